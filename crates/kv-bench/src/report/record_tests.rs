use super::*;
use crate::report::sample::record;

#[test]
fn groups_keep_the_order_of_first_sight() {
    let policies = ["b", "a", "full", "b", "c", "a"];
    let records = policies.map(|policy| record(policy, Some(0.5), metric::EXACT_MATCH, 1.0));
    let groups = group_by(&records, |r| r.policy.as_str());
    let sizes: Vec<_> = groups.iter().map(|(key, group)| (*key, group.len())).collect();
    assert_eq!(sizes, [("b", 2), ("a", 2), ("full", 1), ("c", 1)]);
    let setups = by_setup(&records.iter().collect::<Vec<_>>());
    let order: Vec<_> = setups.iter().map(|setup| setup.0).collect();
    assert_eq!(order, ["full", "b", "a", "c"]);
}

#[test]
fn perplexities_are_averaged_as_likelihoods() {
    let records = [2.0, 8.0].map(|value| record("a", None, metric::PERPLEXITY, value));
    let mean = mean(&records.iter().collect::<Vec<_>>()).unwrap();
    assert!((mean - 4.0).abs() < 1e-12);
    assert_eq!(super::mean(&[]), None);
}

#[test]
fn parts_do_not_count_beside_the_whole() {
    let whole = record("a", None, metric::RELATIVE_ERROR, 0.25);
    let mut part = record("a", None, metric::RELATIVE_ERROR, 0.75);
    part.case.layer = Some(3);
    let mut head = record("a", None, metric::RELATIVE_ERROR, 0.5);
    head.case = Case { head: Some(1), ..part.case.clone() };
    assert_eq!(summary(&[&head, &whole, &part], metric::RELATIVE_ERROR), Some(0.25));
    assert_eq!(summary(&[&part, &head], metric::RELATIVE_ERROR), Some(0.75));
    assert_eq!(summary(&[&head], metric::RELATIVE_ERROR), Some(0.5));
    assert_eq!(summary(&[&part], metric::PERPLEXITY), None);
}

#[test]
fn times_are_milliseconds() {
    let mut time = record("a", None, metric::TIME_TO_FIRST_TOKEN, 0.5);
    time.unit = "s".into();
    assert_eq!(time.number(), 500.0);
}

#[test]
fn json_comes_back_without_nones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.json");
    let mut records = vec![record("full", None, metric::PERPLEXITY, 3.5)];
    records[0].case.depth = Some(0.5);
    write_json(&path, &records).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(r#""case":{"depth":0.5}"#), "{text}");
    assert_eq!(read_json(&path).unwrap(), records);

    records[0].value = f64::INFINITY;
    write_json(&path, &records).unwrap();
    assert!(read_json(&path).unwrap()[0].value.is_nan());
    write_json(&path, &[]).unwrap();
    assert!(read_json(&path).unwrap().is_empty());
}

#[test]
fn a_record_that_is_cut_off_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.json.partial");
    let whole = record("full", None, metric::PERPLEXITY, 3.5);
    let line = serde_json::to_string(&whole).unwrap();
    std::fs::write(&path, format!("{line}\n{line}\n{}", &line[..line.len() - 10])).unwrap();
    assert_eq!(read_json(&path).unwrap(), [whole.clone(), whole]);
    std::fs::write(&path, &line[..line.len() - 10]).unwrap();
    assert!(read_json(&path).is_err());
    std::fs::write(&path, format!("{line}\n{{\"suite\": \"x\"}}\n")).unwrap();
    let error = format!("{:#}", read_json(&path).unwrap_err());
    assert!(error.contains("missing field"), "{error}");
    std::fs::write(&path, "").unwrap();
    assert!(read_json(&path).is_err());
}
