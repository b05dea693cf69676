"""OLMo 3 in flax: model, loss, optimizer, schedule, training, checkpoints, conversion. Imports data and infra."""
