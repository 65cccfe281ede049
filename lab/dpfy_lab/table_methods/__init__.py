"""Methods of synthetic tables that measure marginals, for comparison: on Adult all of them are behind
AIM (docs/studies.md). Found through the entry points `dpfy.synthesizers`.

| method | selection | split | estimator |
|---|---|---|---|
| mwem | as aim, without weights and penalty, with noise that does not change | equal | graphical model |
| rap | as aim | adaptive | relaxed table: a mixture of products |
| privbayes | a network: columns one after the other, each with the columns it depends on | fixed | conditional tables |
| independent | nothing | all for single columns | graphical model |
"""
