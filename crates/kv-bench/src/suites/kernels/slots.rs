//! Moving slots, and choosing among them.

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_kernels::{
    BalanceOptions, BalanceStrategy, Centre, Choice, Draws, KeepLists, KernelError, SlotPool,
    SlotSource, balance, compact_slots, copy_slots, top_slots,
};

use super::KernelBench;
use super::cases::{Compaction, Halving, Ranking};
use super::clock::Clock;

/// Kept slots moved together in all layers, a launch each, in place and into other pools.
pub(super) fn compact(bench: &mut KernelBench<'_>, case: &Compaction) -> anyhow::Result<()> {
    let pairs = case.batch * case.kv_heads;
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let ints = |values: Vec<usize>| {
        let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
        Tensor::<1, Int>::from_data(values.as_slice(), (&device, DType::I32))
    };
    let random = |slots: usize| {
        let shape = [slots * case.head_dim];
        let flat = Tensor::<1>::random(shape, Distribution::Default, (&device, DType::F32));
        flat.cast(dtype).reshape([slots, case.head_dim])
    };
    let positions = |slots: usize| Tensor::<1, Int>::zeros([slots], (&device, DType::I32));
    let pool_bytes = 2 * pairs * case.tokens * case.head_dim * dtype.size();
    let slots = pairs * case.tokens;
    let mut pools: Vec<_> =
        (0..case.layers).map(|_| (random(slots), random(slots), positions(slots))).collect();
    // Ascending and irregular.
    let every = case.tokens / case.kept;
    let kept = |pair: usize, i: usize| i * every + (i * 5 + pair * 3) % every;
    let heads = || (0..pairs).flat_map(|pair| (0..case.kept).map(move |i| (pair, i)));
    let shape = [case.batch, case.kv_heads];
    let lists = KeepLists {
        kept: ints(heads().map(|(pair, i)| kept(pair, i)).collect()),
        starts: ints((0..pairs).map(|pair| pair * case.kept).collect()).reshape(shape),
        counts: ints(vec![case.kept; pairs]).reshape(shape),
        most: case.kept,
    };
    let offsets = ints((0..pairs).map(|pair| pair * case.tokens).collect()).reshape(shape);
    let moved = case.layers * 2 * pool_bytes / every;
    let task = format!("compact_slots {}", case.name());
    bench.measure(&task, "in place", 1, [moved as f64, 0.0], |_| {
        for (keys, values, positions) in &mut pools {
            let pool = SlotPool { keys, values, positions, log_weights: None };
            compact_slots(pool, &offsets, &lists)?;
        }
        Ok(pools.last().map(|(keys, ..)| keys.clone()))
    })?;
    let rows = ints(heads().map(|(pair, i)| pair * case.tokens + kept(pair, i)).collect());
    let to = ints((0..pairs * case.kept).collect());
    let slots = pairs * case.kept;
    let mut smaller: Vec<_> =
        (0..case.layers).map(|_| (random(slots), random(slots), positions(slots))).collect();
    bench.measure(&task, "to another pool", 1, [moved as f64, 0.0], |_| {
        for ((keys, values, positions), to_pool) in pools.iter().zip(&mut smaller) {
            let from = SlotSource { keys, values, positions, log_weights: None };
            let (keys, values, positions) = to_pool;
            let pool = SlotPool { keys, values, positions, log_weights: None };
            copy_slots(from, rows.clone(), pool, to.clone())?;
        }
        Ok(smaller.last().map(|(keys, ..)| keys.clone()))
    })
}

/// The highest scores of every row.
pub(super) fn top(bench: &mut KernelBench<'_>, case: &Ranking) -> anyhow::Result<()> {
    let device = bench.device.clone();
    let bytes = case.rows * case.tokens * 4;
    let sets = Clock::sets(bytes);
    let scores: Vec<Tensor<2>> = (0..sets)
        .map(|_| {
            let shape = [case.rows, case.tokens];
            Tensor::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
        })
        .collect();
    let counts = Tensor::<1, Int>::full([case.rows], case.kept as i32, (&device, DType::I32));
    let task = format!("top_slots {}", case.name());
    bench.measure(&task, "", sets, [bytes as f64, 0.0], |i| {
        Ok(top_slots(scores[i].clone(), None, Choice::Top(counts.clone()), case.kept)?.indices)
    })
}

/// Lists for the self-balancing walk, in several pools.
pub(super) struct Lists {
    pub(super) pools: Vec<[Tensor<2>; 2]>,
    /// Bytes moved and operations done by one call.
    pub(super) work: [f64; 2],
    order: Tensor<2, Int>,
    counts: Tensor<1, Int>,
    options: BalanceOptions,
}

impl Lists {
    pub(super) fn new(bench: &KernelBench<'_>, case: &Halving) -> Self {
        let (device, dtype) = (bench.device.clone(), bench.dtype);
        let Halving { lists, tokens, block, head_dim } = *case;
        let slots = lists * tokens;
        let bytes = 2 * slots * head_dim * dtype.size();
        let random = || {
            let normal = Distribution::Normal(0.0, 1.0);
            let flat = Tensor::<1>::random([slots * head_dim], normal, (&device, DType::F32));
            flat.cast(dtype).reshape([slots, head_dim])
        };
        let pools = (0..Clock::sets(bytes)).map(|_| [random(), random()]).collect();
        let order = Tensor::<1, Int>::arange(0..slots as i64, (&device, DType::I32));
        let options = BalanceOptions {
            block,
            span: 1,
            scale: None,
            log_gamma: Tensor::full([lists], 4f32.ln(), (&device, DType::F32)),
            value_offset: 0.025,
            centre: Centre::List,
            weights: None,
            draws: Draws::Seeds(Tensor::zeros([lists, 2], (&device, DType::I32))),
            halves: true,
            strategy: BalanceStrategy::Auto,
        };
        // Every token meets all before it in its block, by key and by value.
        let operations = (slots * block / 2 * head_dim * 2 * 2) as f64;
        Self {
            pools,
            work: [bytes as f64, operations],
            order: order.reshape([lists, tokens]),
            counts: Tensor::full([lists], tokens as i32, (&device, DType::I32)),
            options,
        }
    }

    /// The kept tokens of each list of a pool.
    pub(super) fn halve(
        &self,
        pool: usize,
        strategy: BalanceStrategy,
    ) -> Result<Tensor<2, Int>, KernelError> {
        let [keys, values] = self.pools[pool].clone();
        let options = BalanceOptions { strategy, ..self.options.clone() };
        Ok(balance(keys, Some(values), self.order.clone(), self.counts.clone(), options)?.kept)
    }
}

/// A list of every head halved by the self-balancing walk, all of its tokens.
pub(super) fn halve(bench: &mut KernelBench<'_>, case: &Halving) -> anyhow::Result<()> {
    let lists = Lists::new(bench, case);
    let task = format!("balance {}", case.name());
    bench.measure(&task, "", lists.pools.len(), lists.work, |i| {
        Ok(lists.halve(i, BalanceStrategy::Auto)?)
    })
}
