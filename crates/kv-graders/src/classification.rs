//! LongBench's `classification_score`.
//!
//! Let `M` be the classes whose names are in the output. A class whose name is a proper part of the
//! reference's leaves `M`. Then `score = 1 / |M|` if the reference is in `M`, else 0.
//!
//! Source: LongBench, `LongBench/metrics.py`.

/// The score of `output`.
///
/// The public code removes classes from the list that it walks over, so the class after a removed
/// one is not looked at and stays. Published scores contain this, and so does this function.
pub(crate) fn classification(output: &str, reference: &str, classes: &[String]) -> f64 {
    let mut matched: Vec<&str> =
        classes.iter().map(String::as_str).filter(|class| output.contains(class)).collect();
    let mut index = 0;
    while index < matched.len() {
        let class = matched[index];
        if reference.contains(class) && class != reference {
            // The public code removes the first equal entry, which can lie before this one if the
            // classes repeat.
            if let Some(first) = matched.iter().position(|other| *other == class) {
                matched.remove(first);
            }
        }
        index += 1;
    }
    if matched.contains(&reference) { 1.0 / matched.len() as f64 } else { 0.0 }
}
