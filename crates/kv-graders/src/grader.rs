//! The graders by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray, VariantNames};

use crate::{
    Answer, GradeError, UnknownName, bleu, boxed, choice, classification, code, count, number,
    plain, rouge, rouge_score, ruler, squad, truthful,
};

/// How an output is scored. Task files name it in kebab case: `squad-f1`.
///
/// Where an answer has several references, the highest score counts, unless said otherwise.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Grader {
    /// 1 if the output is the reference, after trimming both.
    Exact,
    /// 1 if the output contains the trimmed reference.
    Contains,
    /// LongBench's `qa_f1_score`: overlap of words; 0 if both are empty.
    F1,
    /// SQuAD 2.0's F1: overlap of words; 1 if both are empty.
    SquadF1,
    /// SQuAD's exact match of normalised texts.
    SquadExact,
    /// CoQA's F1: the mean, over the references, of the best `squad-f1` against the others.
    CoqaF1,
    /// CoQA's exact match: the same mean of `squad-exact`.
    CoqaExact,
    /// LongBench's `rouge_score`: ROUGE-L of the Python package `rouge`.
    RougeL,
    /// ROUGE-1 of the Python package `rouge-score`.
    Rouge1,
    /// ROUGE-2 of the Python package `rouge-score`.
    Rouge2,
    /// Summary-level ROUGE-L of the Python package `rouge-score`: sentences are lines.
    RougeLsum,
    /// BLEU of one sentence, with the settings of lm-evaluation-harness's TruthfulQA.
    Bleu,
    /// TruthfulQA: 1 if the best `rouge1` of a reference is above that of a wrong answer.
    TruthfulRouge1,
    /// TruthfulQA: 1 if the best `rouge2` of a reference is above that of a wrong answer.
    TruthfulRouge2,
    /// TruthfulQA: 1 if the best `rouge-lsum` of a reference is above that of a wrong answer.
    TruthfulRougeLsum,
    /// TruthfulQA: 1 if the best `bleu` of a reference is above that of a wrong answer.
    TruthfulBleu,
    /// LongBench's `classification_score`. Needs the classes.
    Classification,
    /// LongBench's `count_score`: the fraction of numbers that are the reference.
    Count,
    /// LongBench's `retrieval_score`, for references that say `Paragraph N`.
    Retrieval,
    /// LongBench's `retrieval_zh_score`, for references that say `段落N`.
    RetrievalZh,
    /// LongBench's `code_sim_score`, where fuzzywuzzy uses Python's `difflib`.
    CodeSimilarity,
    /// LongBench's `code_sim_score`, where fuzzywuzzy uses python-Levenshtein.
    CodeSimilarityIndel,
    /// RULER's `string_match_all`: the fraction of references that are in the output.
    StringMatchAll,
    /// RULER's `string_match_part`: 1 if any reference is in the output.
    StringMatchPart,
    /// 1 if the output chooses the reference's letter, in any of the usual forms.
    Choice,
    /// LongBench v2's letter after `The correct answer is`.
    ChoiceLongbenchV2,
    /// lm-evaluation-harness's filter `strict-match` for GPQA.
    ChoiceGpqaStrict,
    /// lm-evaluation-harness's filter `flexible-extract` for GPQA. Needs the choices' texts as
    /// classes.
    ChoiceGpqaFlexible,
    /// 1 if the output's last number has the reference's value.
    Number,
    /// lm-evaluation-harness's filter `strict-match` for GSM8K.
    NumberStrict,
    /// lm-evaluation-harness's filter `flexible-extract` for GSM8K.
    NumberFlexible,
    /// 1 if the answer in the last `\boxed{}` is mathematically equivalent to the reference.
    Boxed,
    /// MATH's own score: the boxed answer is the reference after MATH's normalisation.
    BoxedMath,
}

impl Grader {
    /// All graders.
    pub fn all() -> &'static [Self] {
        <Self as VariantArray>::VARIANTS
    }

    /// Its name in task files.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The score of `output`, from 0 to 1.
    ///
    /// # Errors
    /// [`GradeError`] if the answer lacks what the grader needs. No output is an error.
    pub fn grade(self, output: &str, answer: &Answer) -> Result<f64, GradeError> {
        if answer.references.is_empty() {
            return Err(GradeError::NoReferences { grader: self });
        }
        let needs_classes = matches!(self, Self::Classification | Self::ChoiceGpqaFlexible);
        if needs_classes && answer.classes.is_empty() {
            return Err(GradeError::NoClasses { grader: self });
        }
        let needs_wrong = matches!(
            self,
            Self::TruthfulRouge1
                | Self::TruthfulRouge2
                | Self::TruthfulRougeLsum
                | Self::TruthfulBleu
        );
        if needs_wrong && answer.wrong.is_empty() {
            return Err(GradeError::NoWrong { grader: self });
        }
        let (references, classes) = (&answer.references, &answer.classes);
        Ok(match self {
            Self::Exact => answer.best(|reference| plain::exact(output, reference)),
            Self::Contains => answer.best(|reference| plain::contains(output, reference)),
            Self::F1 => answer.best(|reference| squad::f1(output, reference)),
            Self::SquadF1 => answer.best(|reference| squad::squad_f1(output, reference)),
            Self::SquadExact => answer.best(|reference| squad::squad_exact(output, reference)),
            Self::CoqaF1 => {
                squad::leave_one_out(references, |reference| squad::squad_f1(output, reference))
            }
            Self::CoqaExact => {
                squad::leave_one_out(references, |reference| squad::squad_exact(output, reference))
            }
            Self::RougeL => answer.best(|reference| rouge::rouge_l(output, reference)),
            Self::Rouge1 => answer.best(|reference| rouge_score::rouge_n(output, reference, 1)),
            Self::Rouge2 => answer.best(|reference| rouge_score::rouge_n(output, reference, 2)),
            Self::RougeLsum => answer.best(|reference| rouge_score::rouge_lsum(output, reference)),
            Self::Bleu => answer.best(|reference| bleu::bleu(output, reference)),
            Self::TruthfulRouge1 => truthful::rouge_n(output, answer, 1),
            Self::TruthfulRouge2 => truthful::rouge_n(output, answer, 2),
            Self::TruthfulRougeLsum => truthful::rouge_lsum(output, answer),
            Self::TruthfulBleu => truthful::bleu(output, answer),
            Self::Classification => {
                answer.best(|reference| classification::classification(output, reference, classes))
            }
            Self::Count => answer.best(|reference| count::count(output, reference)),
            Self::Retrieval => answer.try_best(|reference| count::retrieval(output, reference))?,
            Self::RetrievalZh => {
                answer.try_best(|reference| count::retrieval_zh(output, reference))?
            }
            Self::CodeSimilarity => answer.best(|reference| code::difflib(output, reference)),
            Self::CodeSimilarityIndel => answer.best(|reference| code::indel(output, reference)),
            Self::StringMatchAll => ruler::all(output, references),
            Self::StringMatchPart => ruler::part(output, references),
            Self::Choice => answer.try_best(|reference| choice::choice(output, reference))?,
            Self::ChoiceLongbenchV2 => {
                answer.best(|reference| choice::longbench_v2(output, reference))
            }
            Self::ChoiceGpqaStrict => {
                answer.best(|reference| choice::gpqa_strict(output, reference))
            }
            Self::ChoiceGpqaFlexible => {
                answer.best(|reference| choice::gpqa_flexible(output, reference, classes))
            }
            Self::Number => answer.try_best(|reference| number::number(output, reference))?,
            Self::NumberStrict => answer.best(|reference| number::strict(output, reference)),
            Self::NumberFlexible => answer.best(|reference| number::flexible(output, reference)),
            Self::Boxed => answer.best(|reference| boxed::boxed(output, reference)),
            Self::BoxedMath => answer.best(|reference| boxed::boxed_math(output, reference)),
        })
    }
}

impl fmt::Display for Grader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Grader {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::all().iter().copied().find(|grader| grader.name() == name);
        found.ok_or_else(|| UnknownName::new("grader", name, <Self as VariantNames>::VARIANTS))
    }
}

impl TryFrom<String> for Grader {
    type Error = UnknownName;

    fn try_from(name: String) -> Result<Self, UnknownName> {
        name.parse()
    }
}

impl From<Grader> for String {
    fn from(grader: Grader) -> Self {
        grader.name().to_owned()
    }
}
