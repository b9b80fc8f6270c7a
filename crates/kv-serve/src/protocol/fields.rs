//! Bodies, of which each field is known or refused by name.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use serde::de::DeserializeOwned;
use serde_aux::serde_introspection::serde_introspect;
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;

use crate::app::App;
use crate::error::{ApiError, Result};

/// The object in a request's body.
pub(crate) struct Object {
    pub(crate) fields: Map<String, Value>,
    /// What bodies may take of the server's memory. Kept until the fields are read.
    pub(crate) room: OwnedSemaphorePermit,
}

impl FromRequest<Arc<App>> for Object {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self> {
        let kind = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
        // Browsers send other types to any server without asking it first.
        if !kind.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::not_json());
        }
        let (most, patience) = (app.settings.max_body, app.settings.client_timeout);
        let told = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let bytes = told.and_then(|length| length.parse().ok()).unwrap_or(most);
        if bytes > most {
            return Err(ApiError::too_many_bytes(most));
        }
        let room = app.room_for_body(bytes)?;
        let read = tokio::time::timeout(patience, Bytes::from_request(request, app)).await;
        let bytes = read.map_err(|_| {
            let patience = humantime::format_duration(patience);
            ApiError::timeout(format!("the request's body did not come within {patience}"))
        })?;
        let bytes = bytes.map_err(|rejection| ApiError::unread(&rejection, most))?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(object)) => Ok(Self { fields: given(object), room }),
            Ok(_) => Err(ApiError::bad_request("the body must be a JSON object")),
            Err(error) => Err(ApiError::bad_request(format!("the body is not JSON: {error}"))),
        }
    }
}

/// An object's fields without those that are `null`, in its messages too: they are not given, known
/// or not. Clients send back answers with all of their fields.
fn given(mut object: Map<String, Value>) -> Map<String, Value> {
    object.retain(|_, value| !value.is_null());
    let messages = object.get_mut("messages").and_then(Value::as_array_mut);
    for message in messages.into_iter().flatten().filter_map(Value::as_object_mut) {
        message.retain(|_, value| !value.is_null());
    }
    object
}

/// Takes the fields of `T` out of an object. `T` says `deny_unknown_fields`.
///
/// # Errors
/// The field that is wrong, by its path.
pub(crate) fn take<T: DeserializeOwned>(object: &mut Map<String, Value>) -> Result<T> {
    let names = serde_introspect::<T>();
    let own = names.iter().filter_map(|name| Some((name.to_string(), object.remove(*name)?)));
    parse(own.collect())
}

/// Reads the fields that are left: all of them must be `T`'s.
///
/// # Errors
/// The field that is wrong or unknown, by its path.
pub(crate) fn parse<T: DeserializeOwned>(object: Map<String, Value>) -> Result<T> {
    parse_within("", object)
}

/// [`parse`] of the object in the field `parent`.
///
/// # Errors
/// The errors of [`parse`].
pub(crate) fn parse_within<T: DeserializeOwned>(
    parent: &str,
    object: Map<String, Value>,
) -> Result<T> {
    serde_path_to_error::deserialize(Value::Object(object)).map_err(|error| {
        let path = match (parent, error.path().to_string()) {
            ("", path) => path,
            (parent, path) if path == "." => parent.to_string(),
            (parent, path) => format!("{parent}.{path}"),
        };
        let message = error.inner().to_string();
        let within = |field: &str| match path.as_str() {
            "." => field.to_string(),
            path if path == field || path.ends_with(&format!(".{field}")) => path.to_string(),
            path => format!("{path}.{field}"),
        };
        let quoted =
            |start: &str| Some(message.strip_prefix(start)?.split('`').next()?.to_string());
        if let Some(field) = quoted("unknown field `") {
            let field = within(&field);
            let message = format!("`{field}` is not supported by this server");
            ApiError::unsupported(field, message)
        } else if let Some(field) = quoted("missing field `") {
            let field = within(&field);
            let message = format!("`{field}` is missing");
            ApiError::invalid(field, message)
        } else {
            ApiError::invalid(
                path.as_str(),
                format!("`{path}`: {}", kv_policies::in_json(&message)),
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[serde(default)]
        deep: u32,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        must: u32,
        inner: Option<Inner>,
    }

    fn told(value: Value) -> String {
        let Value::Object(object) = value else { panic!("an object") };
        let error = parse::<Outer>(object).unwrap_err().body().error;
        format!("{} {}", error.param.unwrap_or_default(), error.message)
    }

    #[test]
    fn fields_are_named_by_their_paths() {
        let parsed: Outer = parse(Map::from_iter([
            ("must".to_string(), json!(1)),
            ("inner".to_string(), json!({"deep": 2})),
        ]))
        .unwrap();
        assert_eq!((parsed.must, parsed.inner.unwrap().deep), (1, 2));
        assert!(told(json!({"must": 1, "other": 2})).starts_with("other `other` is not supported"));
        assert!(told(json!({})).starts_with("must `must` is missing"));
        assert!(told(json!({"must": -1})).starts_with("must "));
        assert!(told(json!({"must": 1, "inner": {"deep": "x"}})).starts_with("inner.deep "));
        assert!(told(json!({"must": 1, "inner": {"x": 1}})).starts_with("inner.x "));
        let Value::Object(object) = json!({"deep": 1, "x": 1}) else { panic!() };
        let error = parse_within::<Inner>("outer.inner", object).unwrap_err().body().error;
        assert_eq!(error.param.as_deref(), Some("outer.inner.x"));
    }

    #[test]
    fn what_is_null_is_not_given() {
        let object = json!({"must": 1, "store": null, "kv": {"budget": null}, "messages": [
            {"role": "user", "audio": null}, "x"]});
        let Value::Object(object) = object else { panic!() };
        let left = json!({"must": 1, "kv": {"budget": null}, "messages": [{"role": "user"}, "x"]});
        assert_eq!(Value::Object(given(object)), left);
    }

    #[test]
    fn a_part_of_the_fields_is_taken() {
        let Value::Object(mut object) = json!({"must": 1, "other": 2}) else { panic!() };
        assert_eq!(take::<Outer>(&mut object).unwrap().must, 1);
        assert_eq!(Value::Object(object), json!({"other": 2}));
    }
}
