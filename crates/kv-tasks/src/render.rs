//! Templates and expressions of a task, which see the columns of a row as variables.

use std::collections::BTreeMap;

use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};

use crate::rows::Row;
use crate::{Place, TaskError, filters};

/// The variables of a row: its columns, `row` with all of them (for names with spaces), and what
/// the task adds.
pub(crate) struct Variables<'r> {
    row: &'r Row,
    values: BTreeMap<String, Value>,
}

impl<'r> Variables<'r> {
    pub(crate) fn of(row: &'r Row) -> Self {
        let columns = row.columns.iter();
        let mut values: BTreeMap<String, Value> =
            columns.map(|(name, value)| (name.clone(), Value::from_serialize(value))).collect();
        let all =
            Value::from_iter(values.iter().map(|(name, value)| (name.clone(), value.clone())));
        values.insert("row".into(), all);
        Self { row, values }
    }

    pub(crate) fn insert(&mut self, name: &str, value: Value) {
        self.values.insert(name.into(), value);
    }
}

/// The template engine for one task.
pub(crate) struct Renderer<'t> {
    task: &'t str,
    engine: Environment<'t>,
}

impl<'t> Renderer<'t> {
    /// An engine with the methods of Python's strings, lists and dictionaries, and with filters of
    /// its own.
    pub(crate) fn new(task: &'t str) -> Self {
        let mut engine = Environment::new();
        engine.set_undefined_behavior(UndefinedBehavior::Strict);
        engine.set_keep_trailing_newline(true);
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.add_filter("boxed", filters::boxed);
        engine.add_filter("column", filters::column);
        engine.add_filter("full_stops", filters::full_stops);
        engine.add_filter("letter_of", filters::letter_of);
        engine.add_filter("literal", filters::literal);
        Self { task, engine }
    }

    /// Parses a template, so that its faults are found before any row is read.
    pub(crate) fn template(
        &mut self,
        part: &'static str,
        source: &'t str,
    ) -> Result<(), TaskError> {
        self.engine.add_template(part, source).map_err(|error| self.fault(part, None, &error))
    }

    /// Parses an expression.
    pub(crate) fn expression(
        &self,
        part: &'static str,
        source: &'t str,
    ) -> Result<Expression<'_, 't>, TaskError> {
        let compiled = self.engine.compile_expression(source);
        let compiled = compiled.map_err(|error| self.fault(part, None, &error))?;
        Ok(Expression { renderer: self, part, compiled })
    }

    /// The text of a template for a row.
    pub(crate) fn render(
        &self,
        part: &'static str,
        variables: &Variables<'_>,
    ) -> Result<String, TaskError> {
        let template =
            self.engine.get_template(part).map_err(|error| self.fault(part, None, &error))?;
        template.render(&variables.values).map_err(|error| {
            self.fault_of_row(part, variables, &error, || template.undeclared_variables(false))
        })
    }

    fn fault(
        &self,
        part: &'static str,
        place: Option<Place>,
        error: &minijinja::Error,
    ) -> TaskError {
        let mut reason = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            reason.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        TaskError::Template { task: self.task.to_owned(), part, place, reason }
    }

    /// An undefined variable is a missing column, if no column has its name.
    fn fault_of_row(
        &self,
        part: &'static str,
        variables: &Variables<'_>,
        error: &minijinja::Error,
        names: impl Fn() -> std::collections::HashSet<String>,
    ) -> TaskError {
        let place = &variables.row.place;
        let mut names: Vec<String> = names().into_iter().collect();
        names.sort();
        let absent = names.into_iter().find(|name| !variables.values.contains_key(name));
        match absent {
            Some(column) if error.kind() == ErrorKind::UndefinedError => TaskError::MissingColumn {
                place: place.clone(),
                column,
                part,
                task: self.task.into(),
                columns: variables.row.columns.keys().cloned().collect(),
            },
            _ => self.fault(part, Some(place.clone()), error),
        }
    }
}

/// A parsed expression.
pub(crate) struct Expression<'e, 't> {
    renderer: &'e Renderer<'t>,
    part: &'static str,
    compiled: minijinja::Expression<'e, 't>,
}

impl Expression<'_, '_> {
    /// Its value for a row.
    pub(crate) fn value(&self, variables: &Variables<'_>) -> Result<Value, TaskError> {
        let names = || self.compiled.undeclared_variables(false);
        let fault = |error| self.renderer.fault_of_row(self.part, variables, &error, names);
        let value = self.compiled.eval(&variables.values).map_err(fault)?;
        if value.is_undefined() {
            return Err(fault(ErrorKind::UndefinedError.into()));
        }
        Ok(value)
    }

    /// Its value as texts: a text or number is one, a list has one each, null has none.
    pub(crate) fn texts(&self, variables: &Variables<'_>) -> Result<Vec<String>, TaskError> {
        let value = self.value(variables)?;
        let not_text = |value: &Value| TaskError::NotText {
            place: variables.row.place.clone(),
            part: self.part,
            actual: value.kind().to_string(),
        };
        let text = |value: &Value| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None if value.is_number() => Ok(value.to_string()),
            None => Err(not_text(value)),
        };
        if value.is_none() {
            return Ok(Vec::new());
        }
        if value.as_str().is_some() || value.is_number() {
            return Ok(vec![text(&value)?]);
        }
        if value.as_object().is_none() || value.kind() == minijinja::value::ValueKind::Map {
            return Err(not_text(&value));
        }
        let items = value.try_iter().map_err(|_| not_text(&value))?;
        items.map(|item| text(&item)).collect()
    }
}
