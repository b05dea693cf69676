"""The named recipes: `name -> module:function`. Each function takes nothing and returns a Recipe."""

RECIPES = {
    "tiny": "pipelines.recipes.tiny:tiny",
    "olmo3_190m": "pipelines.recipes.olmo3:olmo3_190m",
    "olmo3_7b_stage1": "pipelines.recipes.olmo3:olmo3_7b_stage1",
    "olmo3_32b_stage1": "pipelines.recipes.olmo3:olmo3_32b_stage1",
}
