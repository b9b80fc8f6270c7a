//! Rows of JSON: a line each, an array of objects, or an object of columns.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Deserializer, Map, Value};

use super::{Row, Rows};
use crate::{Place, TaskError};

/// One object a line. Empty lines are skipped.
pub(super) fn lines(path: Arc<Path>, reader: impl Read + 'static) -> Rows {
    let lines = BufReader::new(reader).lines().enumerate();
    let blank = |line: &str| line.trim_matches(['\u{feff}', ' ', '\t', '\r']).is_empty();
    let filled = move |(_, line): &(usize, io::Result<String>)| !line.as_deref().is_ok_and(blank);
    Box::new(lines.filter(filled).map(move |(index, line)| {
        let place = Place { path: path.clone(), row: Some(("line", index + 1)) };
        let line = line.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                TaskError::Json { place: place.clone(), reason: error.to_string() }
            }
            _ => TaskError::io(&*path, error),
        })?;
        match serde_json::from_str(line.trim_start_matches('\u{feff}')) {
            Ok(Value::Object(columns)) => Ok(Row { place, columns }),
            Ok(other) => Err(TaskError::NoRows {
                path: path.to_path_buf(),
                expected: format!("an object on line {}", index + 1),
                actual: kind(&other),
            }),
            Err(error) => Err(TaskError::Json { place, reason: error.to_string() }),
        }
    }))
}

/// A whole file: an array of objects, an object of columns, such a thing under the key `records`,
/// or one object after another.
pub(super) fn table(
    path: Arc<Path>,
    reader: impl Read,
    records: Option<&str>,
) -> Result<Rows, TaskError> {
    let mut values = Vec::new();
    for value in Deserializer::from_reader(BufReader::new(reader)).into_iter() {
        values.push(value.map_err(|error: serde_json::Error| match error.io_error_kind() {
            Some(kind) => TaskError::io(&*path, kind.into()),
            None => TaskError::Json {
                place: Place { path: path.clone(), row: Some(("line", error.line())) },
                reason: error.to_string(),
            },
        })?);
    }
    let no_rows = |expected: &str, actual: String| TaskError::NoRows {
        path: path.to_path_buf(),
        expected: expected.to_owned(),
        actual,
    };
    if values.len() > 1 {
        return listed(path, values);
    }
    let mut value = values.pop().ok_or_else(|| no_rows("an array of objects", "nothing".into()))?;
    if let Some(key) = records {
        let actual = kind(&value);
        value = match value {
            Value::Object(mut object) => object
                .remove(key)
                .ok_or_else(|| no_rows(&format!("an object with the key {key:?}"), actual))?,
            // A data set that was saved again has often lost the key around its rows.
            array @ Value::Array(_) => array,
            _ => return Err(no_rows(&format!("an object with the key {key:?}"), actual)),
        };
    }
    match value {
        Value::Array(rows) => listed(path, rows),
        Value::Object(columns) => transposed(path, columns),
        other => Err(no_rows("an array of objects or an object of arrays", kind(&other))),
    }
}

fn listed(path: Arc<Path>, rows: Vec<Value>) -> Result<Rows, TaskError> {
    Ok(Box::new(rows.into_iter().enumerate().map(move |(index, row)| match row {
        Value::Object(columns) => {
            Ok(Row { place: Place { path: path.clone(), row: Some(("row", index + 1)) }, columns })
        }
        other => Err(TaskError::NoRows {
            path: path.to_path_buf(),
            expected: format!("an object as row {}", index + 1),
            actual: kind(&other),
        }),
    })))
}

fn transposed(path: Arc<Path>, columns: Map<String, Value>) -> Result<Rows, TaskError> {
    let mut rows: Vec<Map<String, Value>> = Vec::new();
    let mut first: Option<String> = None;
    for (column, values) in columns {
        let Value::Array(values) = values else {
            return Err(TaskError::NoRows {
                path: path.to_path_buf(),
                expected: format!("an array under {column:?}"),
                actual: kind(&values),
            });
        };
        match &first {
            None => {
                rows.resize_with(values.len(), Map::new);
                first = Some(column.clone());
            }
            Some(first) if values.len() != rows.len() => {
                return Err(TaskError::Uneven {
                    path: path.to_path_buf(),
                    column,
                    first: first.clone(),
                    expected: rows.len(),
                    actual: values.len(),
                });
            }
            Some(_) => {}
        }
        for (row, value) in rows.iter_mut().zip(values) {
            row.insert(column.clone(), value);
        }
    }
    listed(path, rows.into_iter().map(Value::Object).collect())
}

pub(super) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "a boolean".into(),
        Value::Number(_) => "a number".into(),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "an array".into(),
        Value::Object(object) => {
            let keys: Vec<_> = object.keys().take(8).map(String::as_str).collect();
            format!("an object with the keys {}", keys.join(", "))
        }
    }
}
