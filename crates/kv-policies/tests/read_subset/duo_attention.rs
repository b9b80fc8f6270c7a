//! DuoAttention: heads that stream.

use super::*;

/// Streaming heads hold their window, the others everything; both decode like attention over what
/// they hold.
#[test]
fn duo_attention_streams_with_the_lowest_gates() {
    for tested in quick_devices("read_subset") {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            let gates = json!([[0.5, 0.9], [0.4, 0.2], [0.2, 0.6]]);
            // A window above the second prompt, so that its heads fill up while decoding.
            for (sinks, recents) in [(4, 20), (8, 56)] {
                let config = json!({"policy": "duo-attention", "alpha": gates, "sparsity": 0.5,
                    "sinks": sinks, "recents": recents});
                let streams = |head: usize| head / group == 0;
                follow(&config, &traces, DEEP, &mut |cache, row, head, length| {
                    let kept = support::kept(cache, row * KV_HEADS + head / group);
                    let expected: Vec<usize> = match streams(head) && length > sinks + recents {
                        true => (0..sinks).chain(length - recents..length).collect(),
                        false => (0..length).collect(),
                    };
                    let kept: Vec<usize> = kept.into_iter().map(|at| at as usize).collect();
                    assert_eq!(kept, expected, "{} {config} head {head}", tested.name);
                    let range = row * KV_HEADS + head / group;
                    let capacity = cache.layout().capacities()[range];
                    assert!(!streams(head) || capacity <= sinks + recents, "{capacity} slots");
                    expected
                });
            }
        }
    }
}

/// Gates come from the authors' files; equal ones stream from the first on.
#[test]
fn duo_attention_reads_files_and_meets_budgets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full_attention_heads.tsv");
    std::fs::write(&path, "0.5\t1.2\n0.5\t0.5\n-0.1\t0.5\n").unwrap();
    let built = policy(json!({"policy": "duo-attention", "alpha": path}));
    assert_eq!(built.config()["alpha"], json!([[0.5, 1.0], [0.5, 0.5], [0.0, 0.5]]));
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    let kept = |config: Value| -> Vec<usize> {
        let policy = policy(config);
        let of = |index| trace.prefill(&*policy, LayerContext { index, count: 3 });
        (0..3).flat_map(|index| of(index).layout().lengths().to_vec()).collect()
    };
    let alpha = &built.config()["alpha"];
    let config = json!({"policy": "duo-attention", "alpha": alpha, "sinks": 4, "recents": 6});
    assert_eq!(kept(config.clone()), [10, 90, 10, 90, 10, 90]);
    for (budget, sum) in [(json!(50), 300), (json!(10), 60), (json!(5), 30), (json!(90), 540)] {
        let mut config = config.clone();
        config["budget"] = budget;
        assert_eq!(kept(config.clone()).iter().sum::<usize>(), sum, "{config}");
    }
}
