//! Decode attention.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::add_probabilities::GroupReduction;
use crate::decode_attention::DecodeConfig;
use crate::decode_attention::launch::Call;
use crate::evicting_attention::EvictionConfig;
use crate::extension::{AttentionOps, Eviction};
use crate::{add_probabilities, evicting_attention};

impl AttentionOps for CubeBackend {
    fn decode_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        log_weights: CubeTensor,
        numerators: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        view: CubeTensor,
        config: DecodeConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let call =
            Call { query, keys, values, log_weights, numerators, offsets, lengths, view, config };
        call.run()
    }

    fn evicting_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        log_weights: CubeTensor,
        eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let call = Call {
            query,
            keys,
            values,
            log_weights,
            numerators: eviction.log_norms.clone(),
            offsets: eviction.offsets.clone(),
            lengths: eviction.lengths.clone(),
            view: eviction.limits.clone(),
            config: config.attention,
        };
        let (output, [places, arrivals], importances) =
            evicting_attention::launch::run(call, eviction, config);
        (output, places, arrivals, importances)
    }

    fn add_probabilities(
        sums: CubeTensor,
        logits: CubeTensor,
        log_sum_exp: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        reduction: GroupReduction,
    ) -> CubeTensor {
        add_probabilities::launch::run(sums, logits, log_sum_exp, offsets, lengths, reduction)
    }

    fn add_contributions(
        sums: CubeTensor,
        norms: CubeTensor,
        values: CubeTensor,
        logits: CubeTensor,
        log_sum_exp: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        reduction: GroupReduction,
    ) -> (CubeTensor, CubeTensor) {
        let (ranges, attention) = ([offsets, lengths], [logits, log_sum_exp]);
        add_probabilities::launch::run_weighed([sums, norms], values, attention, ranges, reduction)
    }
}
