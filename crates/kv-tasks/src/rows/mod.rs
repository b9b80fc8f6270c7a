//! Rows of files: JSON, JSON lines, Parquet and CSV, alone or in a ZIP archive.

mod csv;
mod each;
mod json;
mod parquet;
mod zip;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::{Place, TaskError};

pub(crate) use each::each;

/// One row, and where it is.
pub(crate) struct Row {
    pub(crate) place: Place,
    pub(crate) columns: Map<String, Value>,
}

/// A file with rows.
#[derive(Clone, Debug)]
pub(crate) struct RowFile {
    pub(crate) path: PathBuf,
    /// The file in a ZIP archive.
    pub(crate) member: Option<String>,
    /// The key of a JSON object that has the rows.
    pub(crate) records: Option<String>,
}

/// The rows of a file, in order.
pub(crate) type Rows = Box<dyn Iterator<Item = Result<Row, TaskError>>>;

impl RowFile {
    /// The rows of the file. Only JSON and members of archives are read as a whole.
    pub(crate) fn rows(&self) -> Result<Rows, TaskError> {
        let path: Arc<Path> = self.path.as_path().into();
        let open = || File::open(&self.path).map_err(|error| TaskError::io(&self.path, error));
        match (ending(&self.path).as_str(), &self.member) {
            ("parquet", _) => parquet::rows(path, open()?),
            ("zip", Some(member)) => {
                let bytes = zip::member(&path, open()?, member)?;
                let path: Arc<Path> = path.join(member).into();
                let format = ending(&path);
                self.text_rows(path, &format, std::io::Cursor::new(bytes))
            }
            (format, _) => self.text_rows(path, format, BufReader::new(open()?)),
        }
    }

    fn text_rows(
        &self,
        path: Arc<Path>,
        format: &str,
        reader: impl Read + 'static,
    ) -> Result<Rows, TaskError> {
        match format {
            "jsonl" => Ok(json::lines(path, reader)),
            "json" => json::table(path, reader, self.records.as_deref()),
            "csv" => csv::rows(path, reader),
            _ => Err(TaskError::Format { path: path.to_path_buf() }),
        }
    }
}

fn ending(path: &Path) -> String {
    path.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}
