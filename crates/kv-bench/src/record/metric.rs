//! The metrics: their names in records, their units, and how tables name, write and compare them.

use crate::format::Kind::{self, Bytes, LogProb, Plain, Score, Share};

/// How a metric is measured, named, written and compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Info<'a> {
    /// The unit of its records; peers' records may have others.
    pub(crate) unit: &'static str,
    /// Its name in a heading.
    pub(crate) label: &'a str,
    /// How its numbers are written.
    pub(crate) kind: Kind,
    /// Whether more is better, where that can be said.
    pub(crate) higher_is_better: Option<bool>,
}

const MORE: Option<bool> = Some(true);
const LESS: Option<bool> = Some(false);
const NEITHER: Option<bool> = None;

/// Makes a constant of each metric's name, and a table of all metrics. A row has the name, the
/// unit, the heading, the form of its numbers, and whether more or less is better.
macro_rules! metrics {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $unit:literal, $label:literal, $kind:ident,
        $better:ident;)*) => {
        $($(#[$doc])* pub(crate) const $id: &str = $name;)*

        /// All metrics.
        const METRICS: &[(&str, Info<'static>)] = &[$((
            $name,
            Info { unit: $unit, label: $label, kind: $kind, higher_is_better: $better },
        )),*];
    };
}

// Names are stable: `--json` files of different versions compare, and files that have a name of
// `OLD_NAMES` are read as if they had the new one.
metrics! {
    /// Share of the answers that are right, 0 to 1.
    EXACT_MATCH = "exact_match", "share", "exact match", Share, MORE;
    /// Score of a generated answer by its task's grader, 0 to 1.
    SCORE = "score", "share", "score", Share, MORE;
    /// [`SCORE`] beside a paper's number of the same task.
    OUR_SCORE = "our_score", "share", "ours", Score, MORE;
    /// The paper's number, as a share, and [`OUR_SCORE`] less it.
    PUBLISHED_SCORE = "published_score", "share", "published", Score, NEITHER;
    SCORE_DIFFERENCE = "score_less_published", "share", "difference", Score, NEITHER;
    /// Tokens of a generated answer.
    NEW_TOKENS = "new_tokens", "tokens", "new tokens", Plain, NEITHER;
    /// An answer's share of its batch's time, prefill included, in seconds.
    ANSWER_SECONDS = "answer_seconds", "s", "answer s", Plain, LESS;
    /// Log-probability of the right answer, in nats.
    ANSWER_LOGPROB = "answer_logprob", "nats", "answer logprob", LogProb, MORE;
    /// Exponential of the mean negative log-likelihood of a token.
    PERPLEXITY = "perplexity", "perplexity", "perplexity", Plain, LESS;
    /// Perplexity of a prompt's own tokens in prefill, as policies change it.
    PREFILL_PERPLEXITY = "prefill_perplexity", "perplexity", "prefill perplexity", Plain, LESS;
    /// Share of an answer's tokens on which the policy and the full cache agree, 0 to 1.
    AGREEMENT = "agreement", "share", "agreement", Share, MORE;
    /// Agreement with the full cache over the tokens of the text whose perplexity is measured.
    TEXT_AGREEMENT = "text_agreement", "share", "agreement on text", Share, MORE;
    /// Kullback-Leibler divergence of the policy's next-token distributions from the full cache's,
    /// in nats, a mean over an answer's tokens.
    KL_DIVERGENCE = "kl_divergence", "nats", "KL nats", Plain, LESS;
    /// KL divergence from the full cache, a mean over the tokens of the text whose perplexity is
    /// measured.
    TEXT_KL_DIVERGENCE = "text_kl_divergence", "nats", "KL on text", Plain, LESS;
    /// Relative Frobenius error of the attention output.
    RELATIVE_ERROR = "relative_error", "ratio", "relative error", Plain, LESS;
    /// Standard deviation of the relative error over seeds.
    ERROR_DEVIATION = "relative_error_deviation", "ratio", "deviation over seeds", Plain, NEITHER;
    /// Error of the attention output over the softmax's norm times the values', BalanceKV's ε.
    EPSILON = "epsilon", "ratio", "precision ε", Plain, LESS;
    /// Mean norms of queries, of keys less their head's mean, and of values, and half the widths of
    /// the means' 95 % confidence intervals.
    QUERY_NORM = "query_norm", "norm", "query norm", Plain, NEITHER;
    QUERY_NORM_INTERVAL = "query_norm_interval", "norm", "± 95 %", Plain, NEITHER;
    SHIFTED_KEY_NORM = "shifted_key_norm", "norm", "shifted key", Plain, NEITHER;
    SHIFTED_KEY_NORM_INTERVAL = "shifted_key_norm_interval", "norm", "± 95 %", Plain, NEITHER;
    VALUE_NORM = "value_norm", "norm", "value norm", Plain, NEITHER;
    VALUE_NORM_INTERVAL = "value_norm_interval", "norm", "± 95 %", Plain, NEITHER;
    /// `LSE − LSE_full` of a query's weighted logits over the slots and its logits over all tokens,
    /// a mean; 0 where nothing is lost.
    LSE_ERROR = "lse_error", "nats", "LSE error", Plain, NEITHER;
    /// The [`LSE_ERROR`] furthest from 0.
    WORST_LSE_ERROR = "lse_error_worst", "nats", "worst LSE error", Plain, NEITHER;
    /// Relative Frobenius error of one query's attention output.
    QUERY_ERROR = "relative_error_of_a_query", "ratio", "relative error", Plain, LESS;
    /// Share of tokens that no slot represents any more, where slots count the tokens they
    /// represent.
    DROPPED_VOTES = "dropped_votes", "share", "dropped votes", Share, LESS;
    /// Relative error of predicted scores, the median over slots and steps.
    PREDICTION_MEDIAN = "prediction_error_median", "ratio", "median error", Plain, LESS;
    /// Relative error of predicted scores, a mean weighted by attention.
    PREDICTION_MEAN = "prediction_error_mean", "ratio", "mean error", Plain, LESS;
    /// Variance of a sketch's estimates, over the variance of the estimated keys or values.
    VARIANCE = "variance", "of σ²", "variance / σ²", Plain, LESS;
    /// The bound that this variance exceeds with little probability only.
    VARIANCE_BOUND = "variance_bound", "of σ²", "bound / σ²", Plain, NEITHER;
    /// Share of sketches whose variance exceeds the bound.
    ABOVE_BOUND = "above_bound", "share", "above it", Share, LESS;
    /// The share of sketches above the bound that the paper predicts at most.
    ABOVE_BOUND_PREDICTED = "above_bound_predicted", "share", "predicted below", Share, NEITHER;
    /// Slots held.
    SLOTS = "slots", "slots", "slots held", Plain, LESS;
    /// Bound of the error of LongFlow's measure of a slot, a median over heads and steps.
    ERROR_BOUND = "error_bound", "squared", "error bound", Plain, LESS;
    /// The error that [`ERROR_BOUND`] bounds.
    OBSERVED_ERROR = "observed_error", "squared", "observed error", Plain, LESS;
    /// The part of an eviction's effect on the output that LongFlow's measure leaves out, and its
    /// bound.
    EVICTION_RESIDUAL = "eviction_residual", "norm", "eviction residual", Plain, LESS;
    EVICTION_RESIDUAL_BOUND = "eviction_residual_bound", "norm", "residual's bound", Plain, LESS;
    /// The largest change of a logit from one query to the next, and its bound.
    LOGIT_CHANGE = "logit_change", "logit", "logit change", Plain, LESS;
    LOGIT_CHANGE_BOUND = "logit_change_bound", "logit", "change's bound", Plain, LESS;
    /// Share of the full cache's attention that goes to the tokens that a policy reads, 0 to 1.
    RETAINED_MASS = "retained_mass", "share", "retained mass", Share, MORE;
    /// Share of a step's heads that chose the tokens to read, rather than reading the tokens that
    /// an earlier step or another head chose.
    RETRIEVAL_RATIO = "retrieval_ratio", "share", "retrieval ratio", Plain, LESS;
    /// Share of the budget's best tokens that steps read; the best tokens have most attention.
    OVERLAP = "overlap", "share", "overlap with the best", Share, MORE;
    /// Tokens that a head attends to in a step.
    TOKENS_READ = "tokens_read", "tokens", "tokens read", Plain, LESS;
    /// Mean cosine of query heads with themselves a decode step before.
    QUERY_COSINE = "query_cosine", "cosine", "cosine of queries", Plain, NEITHER;
    /// Share of the cosines of [`QUERY_COSINE`] that reach CIS's threshold.
    QUERIES_ALIKE = "queries_alike", "share", "queries alike", Share, NEITHER;
    /// Attention to the best tokens, as many as a step read, less the attention to the tokens that
    /// it read.
    ORACLE_GAP = "oracle_gap", "share", "above the least", Plain, LESS;
    /// Bound on the information that the dropped attention carries, in nats.
    INFORMATION_LOSS = "information_loss", "nats", "information nats", Plain, LESS;
    /// Share of the full cache's attention that goes to tokens outside of a layer's window, and its
    /// bound.
    WINDOW_DROPPED_MASS = "window_dropped_mass", "share", "outside the window", Plain, LESS;
    WINDOW_DROPPED_BOUND = "window_dropped_mass_bound", "share", "window's bound", Plain, LESS;
    /// Total variation between the attention over the layer's own keys and the attention with keys
    /// frozen from the layer below, and its bound.
    FROZEN_KEY_TV = "frozen_key_tv", "share", "frozen keys' TV", Plain, LESS;
    FROZEN_KEY_TV_BOUND = "frozen_key_tv_bound", "share", "TV's bound", Plain, LESS;
    /// The total variation of [`FROZEN_KEY_TV`] in a run in which the policy freezes tokens in all
    /// layers.
    RUN_FROZEN_KEY_TV = "frozen_key_tv_of_run", "share", "TV in a run", Plain, LESS;
    /// Share of the attention to visible tokens that a step did not read, over the steps with a
    /// certificate.
    DROPPED_MASS = "dropped_mass", "share", "dropped mass", Plain, LESS;
    /// Bound on [`DROPPED_MASS`] by the paper's Lipschitz constant; above 1 it says nothing.
    DROPPED_BOUND = "dropped_bound", "share", "paper's bound", Plain, LESS;
    /// The share of bounds above 1, which say nothing.
    BOUND_GT_1_SHARE = "bound_gt_1_share", "share", "bounds above 1", Share, LESS;
    /// Bound on [`DROPPED_MASS`] by odds, which is never above 1.
    ODDS_BOUND = "odds_bound", "share", "bound by odds", Plain, LESS;
    /// Attention to the best tokens among the candidates of a shared set, as many as the set has,
    /// less the attention to the set; and the paper's bound on the difference.
    ORACLE_GAP_IN_SET = "oracle_gap_in_set", "share", "gap in the set", Plain, LESS;
    ORACLE_GAP_IN_SET_BOUND = "oracle_gap_in_set_bound", "share", "gap's bound", Plain, LESS;
    /// The share of steps that dropped, hid or moved more than a bound.
    // Plain: a share of a per cent must not read as none.
    BROKEN = "broken_bounds", "share", "bounds broken", Plain, LESS;
    /// Prompt tokens processed in a second, over the batch.
    PREFILL_TOKENS_PER_SECOND =
        "prefill_tokens_per_second", "tokens/s", "prefill tok/s", Plain, MORE;
    /// Tokens generated in a second, over the batch.
    DECODE_TOKENS_PER_SECOND = "decode_tokens_per_second", "tokens/s", "decode tok/s", Plain, MORE;
    /// Tokens generated in a second, over the full cache's number of tokens.
    SPEED_UP = "speed_up", "times", "speed-up over full", Plain, MORE;
    /// Share of a decode step that merging takes.
    MERGING_SHARE = "merging_share", "share", "merging's share", Share, LESS;
    /// Time from the request to its first token.
    TIME_TO_FIRST_TOKEN = "time_to_first_token", "ms", "first token ms", Plain, LESS;
    /// Time of a decode step of the whole batch.
    STEP_TIME = "step_time", "ms", "last step ms", Plain, LESS;
    /// Time of the slowest of the decode steps that were timed, in milliseconds.
    SLOWEST_STEP = "slowest_step", "ms", "slowest step ms", Plain, LESS;
    /// Time in which a layer's tokens come back from host memory, in milliseconds.
    COPY_TIME = "copy_time", "ms", "copy ms", Plain, NEITHER;
    /// The part of [`COPY_TIME`] that a step waits for, in milliseconds.
    COPY_WAIT = "copy_wait", "ms", "waited ms", Plain, LESS;
    /// Most memory that a GPU's pool reserved at any time of the run, weights included.
    PEAK_BYTES = "peak_bytes", "bytes", "peak memory", Bytes, LESS;
    /// Bytes of weights and caches.
    TOTAL_BYTES = "total_bytes", "bytes", "weights and caches", Bytes, LESS;
    /// Bytes of the slots that hold a token, of all slots' metadata, and of the policy's state.
    LIVE_BYTES = "live_bytes", "bytes", "live memory", Bytes, LESS;
    /// [`LIVE_BYTES`] and the bytes of the slots that are free to decode into.
    CACHE_BYTES = "cache_bytes", "bytes", "cache and room", Bytes, LESS;
    /// Bytes of the slots that hold a token.
    BYTES_IN_USE = "bytes_in_use", "bytes", "KV in use", Bytes, LESS;
    /// Bytes that the cache has allocated.
    BYTES_ALLOCATED = "bytes_allocated", "bytes", "KV allocated", Bytes, LESS;
    /// Bytes of positions, lengths and offsets.
    METADATA_BYTES = "metadata_bytes", "bytes", "metadata", Bytes, LESS;
    /// Bytes of the scratch memory that layers share.
    SCRATCH_BYTES = "scratch_bytes", "bytes", "scratch", Bytes, LESS;
    /// Bytes of the slots that are free to decode into.
    ROOM_BYTES = "room_bytes", "bytes", "room", Bytes, NEITHER;
    /// Bytes of the policy's own state.
    POLICY_BYTES = "policy_bytes", "bytes", "policy state", Bytes, LESS;
    /// Bytes of keys and values that are kept in host memory.
    HOST_BYTES = "host_bytes", "bytes", "host memory", Bytes, LESS;
    /// Sequences that would fit into a given memory, from the bytes measured.
    LARGEST_BATCH = "largest_batch", "sequences", "largest batch", Plain, MORE;
    /// Time of one launch, in microseconds.
    TIME_US = "time_us", "us", "time µs", Plain, LESS;
    /// Arithmetic, in 10^12 operations a second.
    TERAFLOPS = "tflops", "TFLOP/s", "TFLOP /s", Plain, MORE;
    /// Bytes that must move.
    MOVED_BYTES = "moved_bytes", "bytes", "bytes moved", Bytes, NEITHER;
    /// Bytes that must move over the time, in 10^9 a second.
    BANDWIDTH = "bandwidth", "GB/s", "bandwidth GB/s", Plain, MORE;
    /// The bandwidth as a share of the bandwidth of a copy.
    BANDWIDTH_FRACTION = "bandwidth_fraction", "share", "of the copy's", Share, MORE;
}

/// What is known of a metric; an unknown metric is shown under its own name.
pub(crate) fn info(name: &str) -> Info<'_> {
    let unknown = Info { unit: "", label: name, kind: Plain, higher_is_better: None };
    METRICS.iter().find(|(known, _)| *known == name).map_or(unknown, |(_, info)| *info)
}

/// A line of a table's legend for a metric whose heading does not explain it.
pub(crate) fn legend(name: &str) -> Option<&'static str> {
    Some(match name {
        RETAINED_MASS => {
            "retained mass: share of the full cache's attention that goes to the tokens that a \
             policy reads"
        }
        RETRIEVAL_RATIO => {
            "retrieval ratio: share of the heads that choose in a step what to read, as others \
             share a choice"
        }
        DROPPED_VOTES => {
            "dropped votes: share of a prompt's tokens for which no slot stands any more"
        }
        LIVE_BYTES => {
            "live memory: keys and values in use, all slots' metadata and the policy's own state"
        }
        PUBLISHED_SCORE => "published: the paper's number, of its model, device and prompts",
        _ => return None,
    })
}

/// Names that metrics had before, with the names that they have.
pub(super) const OLD_NAMES: [(&str, &str); 15] = [
    ("attention_sag", LSE_ERROR),
    ("attention_sag_worst", WORST_LSE_ERROR),
    ("remainder", EVICTION_RESIDUAL),
    ("remainder_bound", EVICTION_RESIDUAL_BOUND),
    ("drift", LOGIT_CHANGE),
    ("drift_bound", LOGIT_CHANGE_BOUND),
    ("hidden_mass", WINDOW_DROPPED_MASS),
    ("hidden_bound", WINDOW_DROPPED_BOUND),
    ("moved_mass", FROZEN_KEY_TV),
    ("moved_bound", FROZEN_KEY_TV_BOUND),
    ("run_moved_mass", RUN_FROZEN_KEY_TV),
    ("vacuous_bounds", BOUND_GT_1_SHARE),
    ("set_gap", ORACLE_GAP_IN_SET),
    ("set_gap_bound", ORACLE_GAP_IN_SET_BOUND),
    ("held_bytes", LIVE_BYTES),
];
