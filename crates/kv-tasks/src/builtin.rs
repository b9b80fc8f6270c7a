//! The built-in tasks, a TOML file each.

use crate::TaskError;

macro_rules! tasks {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../assets/tasks/", $name, ".toml")))),*]
    };
}

/// Names and TOML.
pub(crate) const TASKS: &[(&str, &str)] = tasks![
    "aime24",
    "aime25",
    "amc23",
    "cnn-dailymail",
    "coqa",
    "gpqa-diamond",
    "gsm8k",
    "gsm8k-boxed",
    "infinitebench/code_debug",
    "infinitebench/code_run",
    "infinitebench/kv_retrieval",
    "infinitebench/longbook_choice_eng",
    "infinitebench/longbook_qa_eng",
    "infinitebench/longbook_sum_eng",
    "infinitebench/longdialogue_qa_eng",
    "infinitebench/math_find",
    "infinitebench/number_string",
    "infinitebench/passkey",
    "longbench/2wikimqa",
    "longbench/gov_report",
    "longbench/hotpotqa",
    "longbench/lcc",
    "longbench/multi_news",
    "longbench/multifieldqa_en",
    "longbench/musique",
    "longbench/narrativeqa",
    "longbench/passage_count",
    "longbench/passage_retrieval_en",
    "longbench/qasper",
    "longbench/qmsum",
    "longbench/repobench-p",
    "longbench/samsum",
    "longbench/trec",
    "longbench/triviaqa",
    "longbench-e/2wikimqa",
    "longbench-e/gov_report",
    "longbench-e/hotpotqa",
    "longbench-e/lcc",
    "longbench-e/multi_news",
    "longbench-e/multifieldqa_en",
    "longbench-e/passage_count",
    "longbench-e/passage_retrieval_en",
    "longbench-e/qasper",
    "longbench-e/repobench-p",
    "longbench-e/samsum",
    "longbench-e/trec",
    "longbench-e/triviaqa",
    "longbench-v2",
    "loogle/longdep_qa",
    "loogle/longdep_summarization",
    "loogle/shortdep_cloze",
    "loogle/shortdep_qa",
    "math-500",
    "mathqa",
    "minerva",
    "olympiadbench",
    "openbookqa",
    "ruler/niah_single_1",
    "ruler/niah_single_2",
    "ruler/niah_single_3",
    "ruler/niah_multikey_1",
    "ruler/niah_multikey_2",
    "ruler/niah_multikey_3",
    "ruler/niah_multivalue",
    "ruler/niah_multiquery",
    "ruler/vt",
    "ruler/cwe",
    "ruler/fwe",
    "ruler/qa_1",
    "ruler/qa_2",
    "truthfulqa",
    "xsum",
    "zeroscrolls/gov_report",
    "zeroscrolls/musique",
    "zeroscrolls/narrative_qa",
    "zeroscrolls/qasper",
    "zeroscrolls/qmsum",
    "zeroscrolls/quality",
    "zeroscrolls/squality",
    "zeroscrolls/summ_screen_fd",
];

/// The TOML of a built-in task.
pub(crate) fn toml(name: &str) -> Result<&'static str, TaskError> {
    if let Some((_, toml)) = TASKS.iter().find(|(known, _)| *known == name) {
        return Ok(toml);
    }
    let similarity = |known: &str| strsim::jaro_winkler(&name.to_lowercase(), known);
    let names = TASKS.iter().map(|(known, _)| *known);
    let nearest = names.max_by(|a, b| similarity(a).total_cmp(&similarity(b))).unwrap_or_default();
    Err(TaskError::UnknownTask { name: name.to_owned(), nearest })
}
