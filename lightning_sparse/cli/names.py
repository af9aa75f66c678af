"""Names that help texts show, as text: the classes they stand for import PyTorch.  A test compares the two."""

#: Strategy -> the first line of its class's docstring.
STRATEGIES = {
    "skip_reduce": "A ring all-reduce whose first s = round(skip * P) reduce-scatter steps are left out (at "
    "most P - 1).",
    "micro": "Each rank selects the large elements of a P-th of the gradient, and all sum those (Yoon and Oh, HiPC "
    "2023).",
    "importance": "Sums the elements whose gradient is large for their weight, by the opinion of a few random ranks.",
    "sketch_fusion": "Ranks sum sketches of their gradients, find the large elements of the sum in it, and sum those "
    "exactly.",
    "ok_topk": "The largest sums of what ranks find large, at nearly the least traffic possible (Li and Hoefler, PPoPP "
    "2022).",
    "low_rank": "Sums a rank-r approximation of each matrix: two thin factors travel in its place.",
    "sparse_dense": "Every rank sends all of its gradient: plain data-parallel training, the baseline of every "
    "comparison.",
    "sparse_topk": "Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the usual "
    "baseline.",
    "sparse_random_k": "Every rank sends the same k = density * n randomly chosen elements.",
    "sparse_auto": "Trains with the candidate that is expected to be soonest at a loss: seconds a step, times the "
    "steps it needs.",
}

#: Models and data of ``bench`` and ``advise``.
WORKLOADS = ("mlp_1m", "mlp_25m", "gpt_3m", "gpt_10m", "gpt_50m", "byte_lm")
MODEL_FORMS = "'package.module:Model', 'package.module:Model,package.module:DataModule' or a config file 'config.yaml'"
