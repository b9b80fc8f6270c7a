//! Rows that hold a list of questions.

use serde_json::Value;

use super::Row;
use crate::{TaskError, literal};

/// A row for each object in the list of a column, with the row's other columns. The list may be
/// JSON or a Python literal in a text. A row without the column is a question already.
pub(crate) fn each(mut row: Row, column: &str) -> Result<Vec<Row>, TaskError> {
    let Some(value) = row.columns.remove(column) else {
        return Ok(vec![row]);
    };
    let value = match &value {
        Value::String(text) => literal::parse(text).unwrap_or(value),
        _ => value,
    };
    let not_list = |actual: &Value| TaskError::NoRows {
        path: row.place.path.to_path_buf(),
        expected: format!("a list of objects in the column {column:?} of {}", row.place),
        actual: super::json::kind(actual),
    };
    let Value::Array(items) = value else {
        return Err(not_list(&value));
    };
    let mut rows = Vec::with_capacity(items.len());
    for item in items {
        let Value::Object(item) = item else {
            return Err(not_list(&item));
        };
        let mut columns = row.columns.clone();
        columns.extend(item);
        rows.push(Row { place: row.place.clone(), columns });
    }
    Ok(rows)
}
