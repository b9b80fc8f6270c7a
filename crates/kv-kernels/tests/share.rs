use kv_kernels::Share;
use kv_testing::golden_files;
use proptest::prelude::*;

/// `prhs_psaw_etf`: window starts of all layers.
#[test]
fn golden_window_starts() {
    for golden in golden_files("golden_window_starts", "prhs_psaw_etf") {
        let (params, starts) = (golden.tensor("params"), golden.tensor("start"));
        let [sets, _] = params.dims();
        let [_, width] = starts.dims();
        for set in 0..sets {
            let [layers, from, base, exponent, tokens] = params.values[5 * set..][..5] else {
                panic!("{}: five parameters a set", golden.name)
            };
            let (layers, from, tokens) = (layers as usize, from as usize, tokens as usize);
            for layer in 0..layers {
                let share = Share::of_depth([base, exponent], layer, from, layers);
                let expected = starts.values[set * width + layer] as usize;
                assert_eq!(share.of(tokens), expected, "{} set {set} layer {layer}", golden.name);
            }
        }
    }
}

#[test]
fn shares_stay_below_one_and_no_layer_is_outside() {
    for share in [1.0, 1.5, f64::INFINITY, 1.0 - 1e-12] {
        let share = Share::new(share);
        assert_eq!(share.of(usize::from(u16::MAX)), usize::from(u16::MAX) - 1);
        assert_eq!((share.of(1), share.of(0), share.first_seen(0)), (0, 0, 0));
        assert_eq!((share.first_seen(1), share.first_seen(9)), (0, 8));
    }
    for share in [0.0, -0.0, -3.0, f64::NAN] {
        assert!(Share::new(share).is_zero());
        assert_eq!((Share::new(share).reaches(0), Share::new(share).reaches(1)), (Some(0), None));
    }
    // Whole products of decimal shares are reached, as in exact arithmetic.
    for tenths in 0..10 {
        let share = Share::new(tenths as f64 / 10.0);
        (0..1_000).for_each(|tens| assert_eq!(share.of(10 * tens), tenths * tens));
    }
    // Layers before the first, layers that are not there, schedules behind the last layer.
    for (layer, from, layers) in [(0, 1, 2), (2, 3, 4), (5, 2, 5), (0, 0, 0), (1, 7, 4), (3, 4, 4)]
    {
        assert!(Share::of_depth([0.5, 1.0], layer, from, layers).is_zero());
    }
    assert_eq!(Share::of_depth([0.25, 1.0], 0, 0, 2), Share::new(0.5));
    // The top layer sees `base^exponent` of the tokens, however many layers there are.
    for (from, layers) in [(0, 1), (2, 3), (3, 4), (6, 8), (24, 32)] {
        let top = Share::of_depth([0.7, 2.0], layers - 1, from, layers);
        assert_eq!(top, Share::new(1.0 - 0.49), "{layers} layers");
    }
}

proptest! {
    /// The same as floats, wherever these are not about to round the other way.
    #[test]
    fn agrees_with_floats(
        base in 0.01f64..1.0,
        exponent in 0.0f64..3.0,
        layers in 1usize..100,
        place in 0.0f64..1.0,
        start in 0.0f64..1.0,
        tokens in 0usize..300_000,
    ) {
        let (layer, from) =
            ((place * layers as f64) as usize, (start * layers as f64) as usize);
        let share = Share::of_depth([base, exponent], layer, from, layers);
        let depth = (layer as f64 + 1.0 - from as f64) / (layers - from) as f64;
        let exact = if layer < from { 0.0 } else { 1.0 - base.powf(exponent * depth) };
        let end = exact * tokens as f64;
        if (end - end.round()).abs() > 1e-4 {
            prop_assert_eq!(share.of(tokens), end.floor() as usize);
        } else {
            prop_assert!((share.of(tokens) as f64 - end).abs() < 1.0001);
        }
        // A window's start stands still or moves on by one.
        let (now, next) = (share.first_seen(tokens), share.first_seen(tokens + 1));
        prop_assert!(now == next || now + 1 == next);
        prop_assert!(now <= tokens);
        // The way back.
        let count = share.of(tokens);
        let least = share.reaches(count).unwrap();
        prop_assert!(least <= tokens && share.of(least) == count);
        prop_assert!(least == 0 || share.of(least - 1) < count);
    }
}
