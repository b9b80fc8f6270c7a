//! Channels by what prefill shows, summed in f64.

use kv_core::read_f32;
use kv_models::{Calibration, ModelError, PrefillPass, TextWindows};
use kv_policies::{ChannelStatistic, Needs};
use kv_testing::quick_devices;

use super::support::{embedded, embedded_folder};

const TEXT: &str = "The sea was calm that day, and the old boat lay upon the sand. When the wind \
    rose in the evening, the fishermen went down to the shore and drew it up, for they knew the \
    coast well, and none of them trusted a red sky over the hills in the last weeks of autumn.";

#[test]
fn channels_are_ranked_over_all_windows() {
    let (heads, kv_heads, dim) = (4, 2, 32);
    for tested in quick_devices("calibration") {
        let model = embedded(&tested);
        let windows = TextWindows::new(&model, TEXT, 24, 3).unwrap();
        // Products, queries, keys: a row a head of a layer.
        let mut sums = [vec![0.0; 4 * heads * dim], vec![0.0; 4 * heads * dim], vec![0.0; 256]];
        for window in windows.tokens() {
            let needs = Needs { window: 24, ..Needs::default() };
            let pass = PrefillPass { needs, ..PrefillPass::default() };
            let observe = &mut |seen: &kv_policies::Observation<'_>| {
                let layer = seen.layer.index;
                let queries = read_f32("queries", seen.window.clone().unwrap()).unwrap();
                let keys = read_f32("keys", seen.keys.clone()).unwrap();
                for (at, &q) in queries.iter().enumerate() {
                    let (head, rest) = (at / (24 * dim), at % (24 * dim));
                    let k = f64::from(keys[head / (heads / kv_heads) * 24 * dim + rest]);
                    let to = (layer * heads + head) * dim + at % dim;
                    sums[0][to] += (f64::from(q) * k).abs();
                    sums[1][to] += f64::from(q).abs();
                }
                for (at, &k) in keys.iter().enumerate() {
                    let head = layer * kv_heads + at / (24 * dim);
                    sums[2][head * dim + at % dim] += f64::from(k).abs();
                }
                Ok(None)
            };
            model.llama().prefill(&[window], pass, observe).unwrap();
        }
        let statistics =
            [ChannelStatistic::Product, ChannelStatistic::Query, ChannelStatistic::Key];
        for (statistic, sums) in statistics.into_iter().zip(&sums) {
            let mut done = 0;
            let found =
                Calibration::measure(&model, "t", &windows, statistic, || done += 1).unwrap();
            assert_eq!((done, found.samples, found.window), (3, 3, 24));
            let rows = found.layers.iter().flatten();
            for (channels, sums) in rows.zip(sums.chunks(dim)) {
                // Falling, but for rounding.
                for pair in channels.windows(2) {
                    let [more, less] = [0, 1].map(|at| sums[pair[at] as usize]);
                    assert!(more > less * (1.0 - 1e-4), "{} {statistic:?}", tested.name);
                }
                let mut all = channels.clone();
                all.sort_unstable();
                assert_eq!(all, (0..dim as u32).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn a_folder_holds_its_own_channels() {
    let folder = embedded_folder();
    let path = Calibration::beside(&folder.path().to_string_lossy()).unwrap();
    assert_eq!(path, folder.path().join("channels.json"));
    let error = Calibration::beside("needle-1m").unwrap_err();
    assert!(matches!(error, ModelError::Fisher(_)), "{error}");
    assert!(error.to_string().contains("no channels.json lies in it"), "{error}");
}
