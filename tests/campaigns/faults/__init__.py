"""The fault campaign: inject each known mistake into our side of a small run, and record who notices.

    make faults                                              all of `catalogue.py`, against one control
    make faults ONLY="bos_added window_one_more"             some of them
    PYTHONPATH=.:tests/campaigns python -m faults --list     their names

catalogue.py   what is injected, in words, and where the sheet warns of it
inject.py      the one-function patches the catalogue uses; inject_training.py those of model, loss and optimizer
chain.py       a run with one fault: the stages again, and the verdict; hear.py what each check said
page.py        JSON, docs/faults.md and a self-contained page
__main__.py    the command
"""
