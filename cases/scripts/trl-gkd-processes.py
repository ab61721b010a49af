# TRL 1.16: GKD's, GOLD's and IW-OPD's gradients are divided by the number of processes
# Tokens of all processes are counted, gradients are averaged over them, and compute_loss leaves out Trainer's factor.
from setup_distilled import made, said, tokenized
from setup_processes import compared, shown
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

PAIRS = [([2, 3], [4, 5, 6, 7, 8]), ([9, 10], [11, 12])]


def gkd(batch):
    return made(GKDTrainer, GKDConfig, [said(*pair) for pair in PAIRS], batch, lmbda=0.0)


def gold(batch):
    return made(GOLDTrainer, GOLDConfig, [tokenized(*pair) for pair in PAIRS], batch, lmbda=0.0)


def iw_opd(batch):
    options = dict(lmbda=0.0, distillation_objective="jsd", loss_top_k=0)
    return made(IWOPDTrainer, IWOPDConfig, [said(*pair) for pair in PAIRS], batch, **options)


shown(compared({"GKD": gkd, "GOLD": gold, "IW-OPD": iw_opd}))
