//! What every policy must do, on bare queries, keys and values.

use burn::tensor::{Int, Tensor};
use kv_core::{Budget, CacheOptions, LayerCache, Room, read_f32};
use kv_policies::{
    Attended, Eviction, LagKv, LayerContext, Merge, Observation, POLICIES, Policy, Result, Scorer,
    Sketch, SlotWeights, StepPlan, StepUpdate, TokenSlot, VagueTokens,
};
use kv_testing::{Numbers, devices};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy, step};

const TOKENS: usize = 300;
const STEPS: usize = 40;

/// Every policy at a budget of 80 tokens.
pub(crate) fn all(budget: Value) -> Vec<Value> {
    let mut configs: Vec<Value> = POLICIES
        .iter()
        .filter(|entry| entry.needs_no_more())
        .map(|entry| json!({"policy": entry.name, "budget": budget}))
        .collect();
    configs.push(json!({
        "policy": "combine",
        "prefill": {"policy": "snapkv", "budget": budget},
        "decode": {"policy": "h2o", "budget": budget},
    }));
    configs.push(json!({"policy": "h2o", "budget": budget, "interval": 16}));
    configs.push(json!({"policy": "kvreviver", "vague": "sketch", "budget": budget}));
    configs.push(json!({
        "policy": "kvreviver", "vague": "summary", "budget": budget,
    }));
    configs.push(json!({
        "policy": "kvreviver", "vague": "archive", "revived": 16, "budget": budget,
    }));
    configs.push(json!({"policy": "quest", "budget": budget, "dense_layers": 0}));
    configs.push(json!({
        "policy": "balancekv-augmented", "budget": budget, "anchors_by": "block-mean",
    }));
    configs.push(json!({
        "policy": "balancekv-augmented", "budget": budget, "anchors_by": "leverage",
        "anchor_span": 4, "span": 4, "weights": "fitted",
    }));
    configs.push(json!({"policy": "double-sparsity", "budget": budget, "dense_layers": 0}));
    configs.push(json!({"policy": "cis", "budget": budget, "labels": 0.25}));
    configs.push(json!({"policy": "duo-attention", "budget": budget, "alpha": [[0.3, 0.8]]}));
    configs
}

struct Run {
    prompt: Prompt,
    query: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
}

fn run(batch: std::ops::Range<usize>, group: usize, device: &burn::tensor::Device) -> Run {
    let mut numbers = Numbers::new(group as u64);
    let (kv_heads, dim) = (2, 16);
    let mut draw = |heads: usize, tokens: usize| {
        let all = numbers.tensor([3, heads, tokens, dim], device);
        all.narrow(0, batch.start, batch.len())
    };
    let (q, k, v) = (draw(2 * group, TOKENS), draw(kv_heads, TOKENS), draw(kv_heads, TOKENS));
    let raw_query = Some(q.clone());
    let frequencies = (0..dim / 2).map(|pair| 0.5f64.powi(pair as i32)).collect();
    Run {
        prompt: Prompt { query: q, keys: k, values: v, raw_query, frequencies },
        query: draw(2 * group, STEPS),
        keys: draw(kv_heads, STEPS),
        values: draw(kv_heads, STEPS),
    }
}

fn decode(run: &Run, policy: &dyn Policy) -> (LayerCache, Vec<f32>) {
    let mut cache = run.prompt.compress(policy, STEPS);
    let mut outputs = Vec::new();
    for index in 0..STEPS {
        let mut step = step(&run.query, &run.keys, &run.values, index, TOKENS + index);
        step.inverse_frequencies = run.prompt.frequencies.clone().into();
        let output = policy.step(LAYER, &mut cache, step).unwrap();
        outputs.push(output.unsqueeze_dim::<4>(1));
    }
    let outputs = Tensor::cat(outputs, 1);
    let [batch, steps, heads, dim] = outputs.dims();
    (cache, read_f32("outputs", outputs.reshape([batch, steps * heads * dim])).unwrap())
}

/// Slots that a head may hold beyond its limit, plus one; `None` where the policy states no limit.
fn beyond_limit(run: &Run, policy: &dyn Policy) -> Option<usize> {
    match run.prompt.observed(|seen| policy.room(seen, STEPS)).unwrap() {
        Room::Limited { over, .. } => Some(over.max(1)),
        Room::Extra(_) | Room::Total(_) => None,
    }
}

/// Of two sequences with one prompt and different seeds, policies that draw hold different slots.
#[test]
fn policies_that_draw_say_so() {
    for config in all(json!(80)) {
        let policy = policy(config.clone());
        let one = run(0..1, 2, &burn::tensor::Device::flex());
        let twice = |tensor: Tensor<4>| tensor.repeat_dim(0, 2);
        let Prompt { query, keys, values, raw_query, frequencies } = one.prompt;
        let raw_query = raw_query.map(twice);
        let (query, keys, values) = (twice(query), twice(keys), twice(values));
        let both = Run {
            prompt: Prompt { query, keys, values, raw_query, frequencies },
            query: twice(one.query),
            keys: twice(one.keys),
            values: twice(one.values),
        };
        let (_, outputs) = decode(&both, &*policy);
        let (first, second) = outputs.split_at(outputs.len() / 2);
        assert_eq!(first != second, policy.capabilities().draws, "{config}");
    }
}

/// Slots of compressed prompts have the weights that the policy says, even where all of a prompt
/// is kept.
#[test]
fn weights_of_slots_are_known_before_a_prompt() {
    for budget in [80, TOKENS] {
        let official = json!({"policy": "balancekv", "official": true, "budget": budget});
        for config in all(json!(budget)).into_iter().chain([official]) {
            let policy = policy(config.clone());
            let run = run(0..2, 2, &burn::tensor::Device::flex());
            let cache = run.prompt.compress(&*policy, STEPS);
            assert_eq!(SlotWeights::of(&cache), policy.capabilities().weights, "{config}");
        }
    }
}

#[test]
fn budgets_hold_in_prefill_and_decode() {
    for tested in devices() {
        for (config, wider) in all(json!(80)).into_iter().zip(all(json!(160))) {
            let policy = policy(config.clone());
            let run = run(0..2, 2, &tested.device);
            let context = format!("{config} on {}", tested.name);
            let does = policy.capabilities();
            let beyond = beyond_limit(&run, &*policy);
            let used = |cache: &LayerCache| cache.layout().used();
            let cache = run.prompt.compress(&*policy, STEPS);
            // What a budget does not change keeps all tokens.
            let wider = run.prompt.compress(&*super::support::policy(wider), STEPS);
            let keeps_all = used(&cache) == used(&wider);
            // Bytes of vague slots are.
            if let Some(vague) = cache.policy_state::<VagueTokens>() {
                let slot = vague.pool().form().slot_share(cache.head_dim());
                let kept: usize = vague.lengths().iter().sum();
                let slots = used(&cache) as f64 + kept as f64 * slot;
                assert!(slots <= 4.0 * 80.0 && kept > 0, "{context}: {slots}");
                continue;
            }
            // Entries of a sketch are a part of the budget.
            let entries = if cache.policy_state::<Sketch>().is_some() { 6 } else { 0 };
            let total = if keeps_all { TOKENS } else { 80 - entries };
            // Without a limit PyramidInfer, which changes prefill, thins generated tokens, which
            // have no budget. Streams grow by levels and fill the budget only now and then.
            let limited = keeps_all || does.changes_prefill || beyond.is_some();
            let streams = does.changes_decode && !limited;
            let slots = used(&cache);
            let least = if streams { 2 * total } else { 4 * total };
            assert!((least..=4 * total).contains(&slots), "{context}: {slots}");
            let (cache, outputs) = decode(&run, &*policy);
            assert!(outputs.iter().all(|x| x.is_finite()), "{context}");
            for &length in cache.layout().lengths() {
                if let Some(beyond) = beyond {
                    assert!(length < total + beyond, "{context}: {length} slots after decode");
                }
            }
            if !does.changes_decode {
                assert_eq!(used(&cache), 4 * (total + STEPS), "{context}");
            }
        }
    }
}

/// A head that keeps more of a prompt than its share, or than the decode policy's budget, holds
/// that many.
#[test]
fn heads_over_their_share_decode_on() {
    let ada = json!({"ada": {"floor": 0.2}});
    let h2o = json!({"policy": "h2o", "budget": 40});
    for config in [
        json!({"policy": "h2o", "budget": 80, "heads": ada}),
        json!({"policy": "r-kv", "budget": 80, "heads": ada, "interval": 16}),
        json!({"policy": "combine", "prefill": {"policy": "adakv", "budget": 80}, "decode": h2o}),
        json!({"policy": "combine", "prefill": {"policy": "snapkv", "budget": 80}, "decode": h2o}),
    ] {
        for tested in devices() {
            let policy = policy(config.clone());
            let run = run(0..2, 2, &tested.device);
            let (cache, outputs) = decode(&run, &*policy);
            assert!(outputs.iter().all(|x| x.is_finite()), "{config} on {}", tested.name);
            let beyond = beyond_limit(&run, &*policy).unwrap();
            let kept = run.prompt.compress(&*policy, STEPS).limits().unwrap().to_vec();
            for (length, kept) in cache.layout().lengths().iter().zip(kept) {
                assert!(*length < kept + beyond, "{config}: {length} slots of {kept}");
            }
        }
    }
}

/// Both parts the same is the same as no combination, renumbered positions included.
#[test]
fn a_policy_combined_with_itself_is_itself() {
    for config in [
        json!({"policy": "streaming-llm", "budget": 80, "rerotate": true}),
        json!({"policy": "h2o", "budget": 80}),
        json!({"policy": "r-kv", "budget": 80, "interval": 16}),
    ] {
        for tested in devices() {
            let run = run(0..2, 2, &tested.device);
            let combined = json!({"policy": "combine", "prefill": config, "decode": config});
            let (single, combined) = (policy(config.clone()), policy(combined));
            assert_eq!(single.capabilities().renumbers, combined.capabilities().renumbers);
            let ((cache, outputs), (expected_cache, expected)) =
                (decode(&run, &*combined), decode(&run, &*single));
            assert_eq!(outputs, expected, "{config} on {}", tested.name);
            assert_eq!(cache.read_positions().unwrap(), expected_cache.read_positions().unwrap());
        }
    }
}

/// Budgets too small for all that LagKV reserves give up its oldest tokens.
#[test]
fn lagkv_keeps_the_newest() {
    for tested in devices() {
        let policy = policy(json!({"policy": "lagkv", "budget": 40, "lag": 64}));
        let cache = run(0..1, 2, &tested.device).prompt.compress(&*policy, 0);
        let expected: Vec<u32> = (0..4).chain(TOKENS as u32 - 36..TOKENS as u32).collect();
        assert_eq!(super::support::kept(&cache, 0), expected);
    }
}

/// LagKV's scores by plain loops: the spread of each token of a chunk in the next chunk's range.
#[test]
fn lagkv_ranks_the_tokens_of_every_chunk() {
    const DIMS: [usize; 4] = [2, 3, 61, 5];
    let [batch, heads, tokens, dim] = DIMS;
    let (first, lag) = (3, 8);
    for tested in devices() {
        let mut numbers = Numbers::new(8);
        // A channel without a range counts as 0.
        let flat = Tensor::<1>::from_data([1.0, 1.0, 0.0, 1.0, 1.0].as_slice(), &tested.device);
        let [keys, values] = [(); 2].map(|()| numbers.tensor(DIMS, &tested.device));
        let keys = keys * flat.reshape([1, 1, 1, dim]);
        let read = |tensor: &Tensor<4>| read_f32("rows", tensor.clone()).unwrap();
        let rows = [read(&keys), read(&values)];
        let spread = |rows: &[f32], head: usize, chunk: usize| {
            let at = |token: usize, channel: usize| {
                f64::from(rows[(head * tokens + first + token) * dim + channel])
            };
            let range = |channel: usize| {
                let next = ((chunk + 1) * lag..(chunk + 2) * lag).map(|token| at(token, channel));
                let low = next.clone().fold(f64::INFINITY, f64::min);
                (low, next.fold(f64::NEG_INFINITY, f64::max) - low)
            };
            let deviations = (chunk * lag..(chunk + 1) * lag).map(|token| {
                let normalised = (0..dim).map(|channel| match range(channel) {
                    (low, range) if range > 0.0 => (at(token, channel) - low) / range,
                    _ => 0.0,
                });
                let mean = normalised.clone().sum::<f64>() / dim as f64;
                let squares: f64 = normalised.map(|x| (x - mean).powi(2)).sum();
                (squares / (dim - 1) as f64).sqrt().exp()
            });
            let sum: f64 = deviations.clone().sum();
            deviations.map(|x| x / sum).collect::<Vec<f64>>()
        };
        let positions = Tensor::<2, Int>::zeros([batch, tokens], &tested.device);
        let observation = Observation::new(&keys, &values, &positions);
        let scores = LagKv { lag, first }.prefill(&observation, 0).unwrap();
        let scores = read_f32("scores", scores).unwrap();
        for head in 0..batch * heads {
            let own = &scores[head * tokens..][..tokens];
            assert!(own[..first].iter().all(|score| score.is_infinite()));
            // 7 whole chunks, of which the last is no chunk's past.
            for chunk in 0..6 {
                let [k, v] = rows.each_ref().map(|rows| spread(rows, head, chunk));
                let both: Vec<f64> = k.iter().zip(v).map(|(k, v)| k + v).collect();
                for (token, score) in both.iter().enumerate() {
                    let rank = both.iter().filter(|other| *other < score).count();
                    let actual = own[first + chunk * lag + token];
                    assert_eq!(actual, rank as f32 / lag as f32, "{} {head} {chunk}", tested.name);
                }
            }
            let stays = &own[first + 6 * lag..];
            assert!(stays[0] > 1.0 && stays.is_sorted() && stays[stays.len() - 1] < f32::INFINITY);
        }
    }
}

/// The paper's compounding schedule, for 32 layers and 4,096 tokens.
#[test]
fn pyramid_infer_follows_the_papers_schedule() {
    let config = json!({"gamma": 0.9});
    let policy: kv_policies::PyramidInfer = serde_json::from_value(config).unwrap();
    let schedule = policy.schedule(4096, 32).unwrap();
    assert_eq!([0, 8, 16, 31].map(|layer| schedule[layer]), [4096, 3985, 3313, 1541]);
}

/// A request gives the same whatever batch it runs in, and leaves nothing behind for the next.
#[test]
fn rows_do_not_leak() {
    for tested in devices() {
        // Other tests compile the kernels for groups of 2.
        let groups: &[usize] = if tested.runs_everything() { &[1, 4] } else { &[2] };
        for &group in groups {
            for config in tested.some(all(json!(0.3)), 3) {
                let policy = policy(config.clone());
                let together = run(0..2, group, &tested.device);
                let (_, both) = decode(&together, &*policy);
                let (_, again) = decode(&together, &*policy);
                assert_eq!(both, again, "{config}: a second request differs from the first");
                let alone = run(0..1, group, &tested.device);
                let (_, first) = decode(&alone, &*policy);
                let worst = first.iter().zip(&both).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-5, "{config} on {} group {group}: {worst}", tested.name);
            }
        }
    }
}

#[test]
fn a_budget_beyond_the_prompt_keeps_everything() {
    // Whatever the budget, windows hide tokens of a model's top layer.
    let hides = |config: &Value| policy(config.clone()).visible_window(LAYER).is_some();
    for tested in devices() {
        let configs = all(json!(1000)).into_iter().filter(|config| !hides(config));
        for config in tested.some(configs, 3) {
            let policy = policy(config.clone());
            let run = run(0..1, 2, &tested.device);
            let cache = run.prompt.compress(&*policy, STEPS);
            assert_eq!(cache.layout().used(), 2 * TOKENS, "{config}");
            // And so decodes like the full cache.
            let (_, outputs) = decode(&run, &*policy);
            let full = super::support::policy(json!({"policy": "full"}));
            let (_, expected) = decode(&run, &*full);
            let worst =
                outputs.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{config} on {}: {worst}", tested.name);
        }
    }
}

#[test]
fn uniform_weights_stand_for_all_tokens() {
    for tested in devices() {
        let policy = policy(json!({"policy": "uniform", "budget": 80}));
        let cache = run(0..2, 2, &tested.device).prompt.compress(&*policy, 0);
        let weights = cache.read_weights().unwrap();
        for range in 0..cache.layout().head_ranges() {
            let sum: f32 = cache.layout().live(range).map(|slot| weights[slot]).sum();
            assert!((sum - TOKENS as f32).abs() < 1e-2, "{sum} tokens represented");
        }
    }
}

#[test]
fn adakv_heads_are_ragged_and_their_total_exact() {
    for tested in devices() {
        let policy = policy(json!({"policy": "adakv", "budget": 80}));
        let cache = run(0..3, 2, &tested.device).prompt.compress(&*policy, 0);
        let lengths = cache.layout().lengths();
        assert!(lengths.windows(2).any(|pair| pair[0] != pair[1]), "{lengths:?}");
        lengths.chunks(2).for_each(|row| assert_eq!(row.iter().sum::<usize>(), 160));
        assert_eq!(cache.layout().total(), cache.layout().used());
    }
}

#[test]
fn budgets_are_those_of_the_configuration() {
    for budget in [Budget::Tokens(80), Budget::Ratio(0.25)] {
        for config in all(serde_json::to_value(budget).unwrap()) {
            let name = config["policy"].as_str().unwrap();
            // These keep all tokens, and have no budget.
            let whole = ["full", "psaw", "etf"].contains(&name);
            assert_eq!(policy(config.clone()).budget(), (!whole).then_some(budget), "{config}");
        }
    }
}

#[test]
fn a_plan_whose_parts_would_be_left_out_is_refused() {
    let device = burn::tensor::Device::flex();
    let run = run(0..1, 1, &device);
    let mut cache = run.prompt.compress(&*policy(json!({"policy": "full"})), STEPS);
    let plan = StepPlan {
        update: Some(StepUpdate::Own(Box::new(|_, _, _| Ok(())))),
        ..StepPlan::attend_with(|cache, query, _| {
            Ok(cache.attend(query, Default::default())?.output)
        })
    };
    let before = cache.layout().lengths().to_vec();
    let step = step(&run.query, &run.keys, &run.values, 0, TOKENS);
    let error = plan.run(LAYER, &mut cache, &step).unwrap_err().to_string();
    assert!(error.contains("an update or an eviction"), "{error}");
    assert_eq!(cache.layout().lengths(), before, "nothing was appended");

    // A merge takes logits, which an attention of a policy's own leaves none of.
    #[derive(Debug)]
    struct Unreached;
    impl Merge for Unreached {
        fn merge(&self, _: &mut LayerCache, _: Attended<'_>) -> Result<Option<Eviction>> {
            unreachable!("the plan is refused")
        }
    }
    let own = StepPlan::attend_with(|cache, query, _| {
        Ok(cache.attend(query, Default::default())?.output)
    });
    let overwrites = StepPlan { slot: TokenSlot::Overwrite, ..StepPlan::append() };
    for plan in [own, overwrites] {
        let error = plan.merging(&Unreached).run(LAYER, &mut cache, &step).unwrap_err();
        assert!(error.to_string().contains("behind an append"), "{error}");
        assert_eq!(cache.layout().lengths(), before, "nothing was appended");
    }
}

#[test]
fn configurations_survive_a_round_trip() {
    for config in all(json!(0.25)) {
        let built = policy(config);
        let again = policy(built.config());
        assert_eq!(built.config(), again.config());
    }
}

#[test]
fn pyramids_share_the_total_exactly() {
    let device = &devices()[0].device;
    let config = json!({"policy": "pyramidkv", "budget": 80});
    let pyramid = policy(config);
    let run = run(0..1, 2, device);
    let mut total = 0;
    let mut last = usize::MAX;
    for index in 0..6 {
        let options = CacheOptions::new(device, burn::tensor::DType::F32);
        let cache = run.prompt.observed(|seen| {
            let mut seen = seen.clone();
            seen.layer = LayerContext { index, count: 6 };
            pyramid.prefill(&seen, 0, options).unwrap()
        });
        let kept = cache.layout().lengths()[0];
        assert!(kept <= last);
        (total, last) = (total + kept, kept);
    }
    assert_eq!(total, 6 * 80);
}

/// A Burn module like others: it moves to a device, clones deeply, and wants a prompt first.
#[test]
fn compressed_attention_is_a_module() {
    use burn::module::Module;
    for tested in devices() {
        let run = run(0..2, 2, &tested.device);
        let policy = policy(json!({"policy": "h2o", "budget": 80}));
        let (_, expected) = decode(&run, &*policy);
        let mut module = kv_policies::CompressedAttention::new(policy, LAYER);
        let first = |index| step(&run.query, &run.keys, &run.values, index, TOKENS + index);
        let error = module.forward(first(0)).unwrap_err().to_string();
        assert!(error.contains("a prompt"), "{error}");

        let options = CacheOptions::new(&tested.device, burn::tensor::DType::F32);
        run.prompt.observed(|seen| module.prefill(seen, STEPS, options)).unwrap();
        let twin = module.clone();
        let cpu = burn::tensor::Device::flex();
        let moved = module.to_device(&cpu);
        assert_eq!(moved.devices(), [cpu]);
        for mut module in [moved.to_device(&tested.device), twin] {
            let outputs = (0..STEPS).map(|index| module.forward(first(index)).unwrap());
            let outputs =
                Tensor::cat(outputs.map(|output| output.unsqueeze_dim::<4>(1)).collect(), 1);
            assert_eq!(read_f32("outputs", outputs.flatten::<1>(0, 3)).unwrap(), expected);
        }
    }
}
