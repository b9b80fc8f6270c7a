//! Questions about documents: `qa_1` (SQuAD) and `qa_2` (HotpotQA) of RULER.

use std::collections::HashMap;

use rand::seq::SliceRandom;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Generate, Prompt};
use crate::data::Data;
use crate::rows::Row;
use crate::{QuestionOptions, TaskError, random};

/// Questions about a few documents, among others.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Documents {
    dataset: DataSet,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DataSet {
    Squad,
    Hotpotqa,
}

/// A question and its documents.
struct Asked {
    question: String,
    references: Vec<String>,
    documents: Vec<usize>,
    /// Documents of the same article, which come before others.
    similar: Vec<usize>,
}

/// All documents of a data set, each once.
#[derive(Default)]
struct Library {
    texts: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Library {
    fn number(&mut self, text: &str) -> usize {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        self.numbers.insert(text.to_owned(), self.texts.len());
        self.texts.push(text.to_owned());
        self.texts.len() - 1
    }
}

impl Documents {
    pub(super) fn generator(
        &self,
        task: &str,
        data: Option<&Data>,
        options: &QuestionOptions,
    ) -> Result<Generator, TaskError> {
        let data = data.ok_or_else(|| TaskError::NoFolder {
            task: task.to_owned(),
            expected: vec!["a file of questions and documents".into()],
        })?;
        let files = data.files(task, options.folder.as_deref())?;
        let mut library = Library::default();
        let (mut asked, mut articles) = (Vec::new(), HashMap::new());
        for file in &files {
            for row in file.rows()? {
                let row = row?;
                let reader = Reader { task, row: &row };
                match self.dataset {
                    DataSet::Squad if row.columns.contains_key("paragraphs") => {
                        reader.article(&mut library, &mut asked)?;
                    }
                    DataSet::Squad => reader.squad(&mut library, &mut articles, &mut asked)?,
                    DataSet::Hotpotqa => asked.push(reader.hotpotqa(&mut library)?),
                }
            }
        }
        for (title, question) in articles.values().flat_map(|article: &Article| {
            article.questions.iter().map(move |question| (&article.documents, *question))
        }) {
            let question: &mut Asked = &mut asked[question];
            let others = title.iter().copied().filter(|number| *number != question.documents[0]);
            question.similar = others.collect();
        }
        if asked.is_empty() {
            let path = files.into_iter().next().map(|file| file.path).unwrap_or_default();
            return Err(TaskError::NoQuestions { task: task.to_owned(), path });
        }
        Ok(Generator { asked, texts: library.texts, seed: options.seed })
    }
}

/// Documents and questions of an article, where each row of a table is a question.
#[derive(Default)]
struct Article {
    documents: Vec<usize>,
    questions: Vec<usize>,
}

struct Reader<'r> {
    task: &'r str,
    row: &'r Row,
}

impl Reader<'_> {
    fn missing(&self, column: &str) -> TaskError {
        TaskError::MissingColumn {
            place: self.row.place.clone(),
            column: column.to_owned(),
            part: "ruler",
            task: self.task.into(),
            columns: self.row.columns.keys().cloned().collect(),
        }
    }

    fn get<'v>(&self, from: &'v Map<String, Value>, key: &str) -> Result<&'v Value, TaskError> {
        from.get(key).ok_or_else(|| self.missing(key))
    }

    fn text<'v>(&self, from: &'v Map<String, Value>, key: &str) -> Result<&'v str, TaskError> {
        self.get(from, key)?.as_str().ok_or_else(|| self.missing(key))
    }

    fn list<'v>(&self, from: &'v Map<String, Value>, key: &str) -> Result<&'v [Value], TaskError> {
        let list = self.get(from, key)?.as_array();
        list.map(Vec::as_slice).ok_or_else(|| self.missing(key))
    }

    fn object<'v>(&self, value: &'v Value, key: &str) -> Result<&'v Map<String, Value>, TaskError> {
        value.as_object().ok_or_else(|| self.missing(key))
    }

    /// An article of SQuAD's own file.
    fn article(&self, library: &mut Library, asked: &mut Vec<Asked>) -> Result<(), TaskError> {
        let paragraphs = self.list(&self.row.columns, "paragraphs")?;
        let mut read = Vec::new();
        for paragraph in paragraphs {
            let paragraph = self.object(paragraph, "paragraphs")?;
            read.push((library.number(self.text(paragraph, "context")?), paragraph));
        }
        let all: Vec<usize> = read.iter().map(|(number, _)| *number).collect();
        for (number, paragraph) in read {
            for question in self.list(paragraph, "qas")? {
                let question = self.object(question, "qas")?;
                if question.get("is_impossible") == Some(&Value::Bool(true)) {
                    continue;
                }
                let mut references = Vec::new();
                for answer in self.list(question, "answers")? {
                    let answer = self.object(answer, "answers")?;
                    references.push(self.text(answer, "text")?.to_owned());
                }
                asked.push(Asked {
                    question: self.text(question, "question")?.to_owned(),
                    references: self.filled(references)?,
                    documents: vec![number],
                    similar: all.iter().copied().filter(|other| *other != number).collect(),
                });
            }
        }
        Ok(())
    }

    /// A question of SQuAD as the hub has it. Questions without an answer are skipped.
    fn squad(
        &self,
        library: &mut Library,
        articles: &mut HashMap<String, Article>,
        asked: &mut Vec<Asked>,
    ) -> Result<(), TaskError> {
        let columns = &self.row.columns;
        let number = library.number(self.text(columns, "context")?);
        let article = articles.entry(self.text(columns, "title")?.to_owned()).or_default();
        if !article.documents.contains(&number) {
            article.documents.push(number);
        }
        let answers = self.object(self.get(columns, "answers")?, "answers")?;
        let mut references = Vec::new();
        for answer in self.list(answers, "text")? {
            references.push(answer.as_str().ok_or_else(|| self.missing("answers"))?.to_owned());
        }
        if !references.is_empty() {
            article.questions.push(asked.len());
            asked.push(Asked {
                question: self.text(columns, "question")?.to_owned(),
                references: self.filled(references)?,
                documents: vec![number],
                similar: Vec::new(),
            });
        }
        Ok(())
    }

    /// A question of HotpotQA: its context is a list of titles with sentences, or on the hub a list
    /// of titles and a list of sentences.
    fn hotpotqa(&self, library: &mut Library) -> Result<Asked, TaskError> {
        let columns = &self.row.columns;
        let none = || self.missing("context");
        let pairs: Vec<(&Value, &Value)> = match self.get(columns, "context")? {
            Value::Array(pairs) => {
                let pair = |pair: &'_ Value| Some((pair.get(0)?.clone(), pair.get(1)?.clone()));
                if pairs.iter().any(|found| pair(found).is_none()) {
                    return Err(none());
                }
                pairs.iter().map(|pair| (&pair[0], &pair[1])).collect()
            }
            Value::Object(lists) => {
                let (titles, texts) = (self.list(lists, "title")?, self.list(lists, "sentences")?);
                titles.iter().zip(texts).collect()
            }
            _ => return Err(none()),
        };
        let mut documents = Vec::new();
        for (title, sentences) in pairs {
            let title = title.as_str().ok_or_else(none)?;
            let sentences = sentences.as_array().ok_or_else(none)?;
            let sentences: Option<String> = sentences.iter().map(Value::as_str).collect();
            documents.push(library.number(&format!("{title}\n{}", sentences.ok_or_else(none)?)));
        }
        Ok(Asked {
            question: self.text(columns, "question")?.to_owned(),
            references: self.filled(vec![self.text(columns, "answer")?.to_owned()])?,
            documents,
            similar: Vec::new(),
        })
    }

    fn filled(&self, references: Vec<String>) -> Result<Vec<String>, TaskError> {
        if references.iter().all(|reference| reference.trim().is_empty()) {
            return Err(TaskError::EmptyAnswer { place: self.row.place.clone() });
        }
        Ok(references)
    }
}

pub(super) struct Generator {
    asked: Vec<Asked>,
    texts: Vec<String>,
    seed: u64,
}

impl Generate for Generator {
    fn least(&self, question: usize) -> usize {
        self.asked[question].documents.len()
    }

    fn questions(&self) -> usize {
        self.asked.len()
    }

    fn prompt(&self, question: usize, size: usize) -> Prompt {
        let asked = &self.asked[question];
        let mut random = random::stream(self.seed, "documents", question);
        let mut chosen = asked.documents.clone();
        let mut similar = asked.similar.clone();
        similar.shuffle(&mut random);
        chosen.extend(similar);
        let mut taken = vec![false; self.texts.len()];
        for &number in &chosen {
            taken[number] = true;
        }
        let mut others: Vec<_> = (0..self.texts.len()).filter(|&number| !taken[number]).collect();
        others.shuffle(&mut random);
        chosen.extend(others);
        // Where there are not enough documents, all of them come again.
        let mut chosen: Vec<_> = chosen.into_iter().cycle().take(size).collect();
        chosen.shuffle(&mut random);
        let numbered = chosen.iter().enumerate();
        let documents: Vec<_> = numbered
            .map(|(index, &number)| format!("Document {}:\n{}", index + 1, self.texts[number]))
            .collect();
        Prompt {
            context: format!(
                "{INSTRUCTION}\n\nThe following are given documents.\n\n{}",
                documents.join("\n\n")
            ),
            question: format!("\n\n{INSTRUCTION}\n\nQuestion: {}", asked.question),
            answer_prefix: " Answer:".into(),
            references: asked.references.clone(),
        }
    }
}

const INSTRUCTION: &str = "Answer the question based on the given documents. Only give me the \
                           answer and do not output any other words.";
