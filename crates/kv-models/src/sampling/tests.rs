use super::Sampling;
use crate::error::ModelError;

const ONE: Sampling = Sampling {
    repetition_penalty: 1.0,
    temperature: 1.0,
    top_k: None,
    top_p: None,
    min_p: None,
    seed: 1,
};

#[test]
fn ranges_are_checked() {
    for (json, name) in [
        (r#"{"temperature": -1.0}"#, "temperature"),
        (r#"{"repetition_penalty": 0.0}"#, "repetition_penalty"),
        (r#"{"top_k": 0}"#, "top_k"),
        (r#"{"top_p": 0.0}"#, "top_p"),
        (r#"{"top_p": 1.1}"#, "top_p"),
        (r#"{"min_p": -0.1}"#, "min_p"),
    ] {
        match serde_json::from_str::<Sampling>(json).unwrap().settings() {
            Err(ModelError::InvalidSampling { parameter, .. }) => assert_eq!(parameter, name),
            other => panic!("{json}: {other:?}"),
        }
    }
    for bad in [f64::NAN, f64::INFINITY] {
        let (temperature, top_p, min_p) = (bad, Some(bad), Some(bad));
        assert!(Sampling { repetition_penalty: bad, ..ONE }.settings().is_err());
        assert!(Sampling { temperature, ..ONE }.settings().is_err());
        assert!(Sampling { top_p, ..ONE }.settings().is_err());
        assert!(Sampling { min_p, ..ONE }.settings().is_err());
    }
}

#[test]
fn settings_are_serde() {
    let sampling: Sampling = serde_json::from_str(r#"{"temperature": 0.7, "top_k": 40}"#).unwrap();
    assert_eq!(sampling, Sampling { temperature: 0.7, top_k: Some(40), ..Sampling::default() });
    assert!(serde_json::from_str::<Sampling>(r#"{"temprature": 0.7}"#).is_err());
}
