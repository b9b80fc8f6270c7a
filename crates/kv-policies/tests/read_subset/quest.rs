//! Quest: pages by bounds.

use super::*;

/// How the reference chooses pages.
struct Pages<'a> {
    heads: &'a str,
    always_last: bool,
    page: usize,
    /// Pages that are read.
    count: usize,
}

/// Slots of the pages of the highest bounds, of one query head.
fn pages_of(trace: &Trace, head: usize, length: usize, how: &Pages<'_>) -> Vec<usize> {
    let &Pages { heads, always_last, page: each, count } = how;
    let group = trace.heads[0].len() / KV_HEADS;
    let pages = length.div_ceil(each);
    let score = |head: usize, page: usize| -> f64 {
        let query = trace.query(head, length - 1);
        let span = &trace.keys(head)[page * each..((page + 1) * each).min(length)];
        let bound = |d: usize| {
            let products = span.iter().map(|key| query[d] * key[d]);
            products.fold(f64::MIN, f64::max)
        };
        (0..DIM).map(bound).sum()
    };
    let members = head / group * group..(head / group + 1) * group;
    let open = if always_last { pages - 1 } else { pages };
    let scores: Vec<f64> = (0..open)
        .map(|page| match heads {
            "query" => score(head, page),
            "max" => members.clone().map(|h| score(h, page)).fold(f64::MIN, f64::max),
            _ => members.clone().map(|h| score(h, page)).sum(),
        })
        .collect();
    let mut chosen = best(&scores, if always_last { count - 1 } else { count });
    if always_last {
        chosen.push(pages - 1);
    }
    chosen.into_iter().flat_map(|page| page * each..((page + 1) * each).min(length)).collect()
}

#[test]
fn quest_reads_the_pages_of_an_f64_reference() {
    for tested in quick_devices("read_subset") {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            for heads in ["query", "max", "mean"] {
                for (last, budget) in [("always", 32), ("scored", 40)] {
                    let config = json!({"policy": "quest", "budget": budget, "page": 8,
                        "heads": heads, "last_page": last});
                    let always_last = last == "always";
                    let how = Pages { heads, always_last, page: 8, count: budget / 8 };
                    follow(&config, &traces, DEEP, &mut |_, row, head, length| {
                        pages_of(&traces[row], head, length, &how)
                    });
                }
            }
        }
    }
}

/// Pages are halved until a sequence's own budget holds four of them, in a batch too.
#[test]
fn pages_fit_short_prompts() {
    for tested in quick_devices("read_subset") {
        let traces = traces(2, &tested.device);
        let config = |fit: bool| json!({"policy": "quest", "budget": 0.2, "fit_page": fit});
        // A fifth of 90 tokens is 18, four pages of 4; that of 61 is 12, six pages of 2.
        let fitted = [(4, 4), (2, 6)];
        // The paper's form: the last page of 16.
        for (fit, own) in [(true, fitted), (false, [(16, 1), (16, 1)])] {
            follow(&config(fit), &traces, DEEP, &mut |_, row, head, length| {
                let (page, count) = own[row];
                let how = Pages { heads: "query", always_last: true, page, count };
                pages_of(&traces[row], head, length, &how)
            });
        }
        let sizes = |config: Value| PageBounds::sizes(&traces[0].prefill(&*policy(config), DEEP));
        for (budget, page) in [(64, 16), (63, 8), (32, 8), (31, 4), (15, 2), (7, 1), (1, 1)] {
            assert_eq!(sizes(json!({"policy": "quest", "budget": budget})), [page], "{budget}");
        }
        let paper = json!({"policy": "quest", "budget": 16, "fit_page": false});
        assert_eq!(sizes(paper), [16]);
    }
}

#[test]
fn golden_quest() {
    for golden in golden_files("golden_quest", "quest_official") {
        for tested in exact_devices("golden_quest") {
            let device = &tested.device;
            let context = format!("{} on {}", golden.name, tested.name);
            let [k, v] = ["k", "v"].map(|name| golden.tensor(name).on::<4>(device));
            let q: Tensor<3> = golden.tensor("q").on(device);
            let ([batch, heads, _], [_, kv_heads, tokens, dim]) = (q.dims(), k.dims());
            let page = golden.number("chunk") as usize;
            let budget = golden.number("token_budget") as usize;
            // Scores of all pages, and without the last one.
            let pages = tokens.div_ceil(page);
            let total_kv_heads = batch * kv_heads;
            let offsets =
                (0..total_kv_heads as i32).map(|range| range * tokens as i32).collect::<Vec<_>>();
            let ints = |values: &[i32]| {
                Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([batch, kv_heads])
            };
            let ranges = SlotRanges {
                offsets: ints(&offsets),
                lengths: ints(&vec![tokens as i32; total_kv_heads]),
            };
            let pool = k.clone().reshape([total_kv_heads * tokens, dim]);
            let rows = page_rows(total_kv_heads * tokens, total_kv_heads, page);
            let mut bounds = Tensor::zeros([rows, dim], (device, DType::F32));
            page_bounds(&pool, &ranges, &mut bounds, page, PageSpan::All { longest: tokens })
                .unwrap();
            let budgets =
                Tensor::<3, Int>::full([batch, heads, 3], budget as i32, (device, DType::I32));
            for (always_last, name) in
                [(false, "page_score"), (true, "page_score_ref_cpu_estimate_without_last")]
            {
                let options = PageOptions { page, heads: PageHeads::Query, always_last };
                let scored =
                    page_scores(q.clone(), &bounds, &ranges, &budgets, pages, options).unwrap();
                let open = pages - usize::from(always_last);
                let scores = read_f32("scores", scored.scores.narrow(1, 0, open)).unwrap();
                let error = relative_error(&scores, &golden.tensor(name).values);
                assert!(error < 1e-5, "{context}: {name} off by {error}");
            }
            // The evaluation's step: the last token is the step's own.
            let prompt = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens - 1);
            let queries = q.clone().unsqueeze_dim::<4>(2);
            let quest = policy(json!({"policy": "quest", "budget": budget, "page": page,
                "last_page": "scored", "dense_layers": 0, "fit_page": false}));
            let mut cache =
                Prompt::new(queries.clone(), prompt(&k), prompt(&v)).compress(&*quest, 1);
            let last = |x: &Tensor<4>| x.clone().narrow(2, tokens - 1, 1).squeeze_dim::<3>(2);
            let position = Tensor::full([batch], tokens as i32 - 1, (device, DType::I32));
            let step = Step::new(q.clone(), last(&k), last(&v), position);
            let output = quest.step(support::LAYER, &mut cache, step).unwrap();
            let output = read_f32("output", output).unwrap();
            let error = relative_error(&output, &golden.tensor("out").values);
            assert!(error < 1e-5, "{context}: output off by {error}");
            let options = PageOptions { page, heads: PageHeads::Query, always_last: false };
            let SlotList { slots, counts } =
                PageBounds::choose(&cache, q.clone(), &budgets, budget, options).unwrap();
            let width = slots.dims()[1];
            let (slots, counts) =
                (read_i32("slots", slots).unwrap(), read_i32("counts", counts).unwrap());
            let mask = golden.tensor("mask");
            for head in 0..batch * heads {
                let offset = cache.layout().offsets()[head / (heads / kv_heads)];
                let own = slots[head * width..][..counts[head] as usize].iter();
                let own: Vec<usize> = own.map(|&slot| slot as usize - offset).collect();
                let row = &mask.values[head * tokens..][..tokens];
                let expected: Vec<usize> = (0..tokens).filter(|&at| row[at] != 0.0).collect();
                assert_eq!(own, expected, "{context} head {head}");
            }
        }
    }
}

/// Caches report the bytes of what is kept beside their slots.
#[test]
fn bounds_of_pages_are_counted() {
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    let bytes = |name: &str| {
        let policy = policy(json!({"policy": name, "budget": 64}));
        trace.prefill(&*policy, DEEP).memory().policy
    };
    // Two rows a page: 198 slots in 12 pages, and one more for each range and at the end.
    let bounds = 2 * (198 / 16 + 2 + 1) * DIM * 4;
    // A head's budgets, and the sequence's page.
    assert_eq!(bytes("quest"), bounds + (4 * 3 + 1) * 4);
    assert_eq!(bytes("full"), 0);
}
