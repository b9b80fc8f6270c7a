use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{Hub, is_hub_id, resolve};
use crate::error::{HubError, ModelError};

const MODEL: &str = "org/name";
const COMMIT: &str = "0123abc";

fn hub(cache: &Path) -> Hub {
    Hub { cache: cache.into(), endpoint: None, token: None, offline: true, progress: false }
}

/// A cached snapshot of `files`.
fn fill(cache: &Path, files: &[(&str, &str)]) {
    let repo = cache.join("models--org--name");
    let snapshot = repo.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for (name, text) in files {
        fs::write(snapshot.join(name), text).unwrap();
    }
}

/// Answers as the hub does, for one model; returns its address and what it was asked for.
fn serve(files: &[(&str, &str)]) -> (String, Arc<Mutex<Vec<String>>>) {
    let files: BTreeMap<_, _> =
        files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::new(Mutex::new(Vec::new()));
    let seen = log.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.unwrap(), &files, &seen);
        }
    });
    (address, log)
}

fn answer(mut stream: TcpStream, files: &BTreeMap<String, String>, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_string();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let from = headers.iter().find_map(|line| line.strip_prefix("Range: bytes="));
    log.lock().unwrap().push(path.clone());
    let (status, extra, body) = if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> =
            files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"siblings": siblings, "sha": COMMIT});
        ("200 OK", String::new(), info.to_string())
    } else if let Some(text) =
        path.strip_prefix("/org/name/resolve/main/").and_then(|f| files.get(f))
    {
        let (from, to) = from.unwrap().split_once('-').unwrap();
        let from: usize = from.parse().unwrap();
        let to = to.parse().map_or(text.len(), |to: usize| to + 1);
        let extra = format!(
            "ETag: \"{:x}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {from}-{}/{}\r\n",
            path.len() * 1000 + text.len(),
            to - 1,
            text.len(),
        );
        ("206 Partial Content", extra, text[from..to].to_string())
    } else {
        ("404 Not Found", String::new(), String::new())
    };
    let head = format!("HTTP/1.1 {status}\r\n{extra}Content-Length: {}\r\n", body.len());
    write!(stream, "{head}Connection: close\r\n\r\n{body}").unwrap();
}

const INDEX: &str = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;

#[test]
fn names_of_models() {
    for name in ["org/name", "Qwen/Qwen2.5-7B", "_x/a_b-c.d"] {
        assert!(is_hub_id(name), "{name}");
    }
    for name in ["name", "/abs/path", "./rel", "../up", "a/b/c", "org/", "a b/c", "a/..b", "~/x"] {
        assert!(!is_hub_id(name), "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(resolve(folder.path().to_str().unwrap()).unwrap(), folder.path());
    assert!(matches!(
        resolve("/no/such/folder"),
        Err(ModelError::Hub(HubError::UnknownModel { .. }))
    ));
}

#[test]
fn a_complete_snapshot_needs_no_network() {
    let cache = tempfile::tempdir().unwrap();
    fill(cache.path(), &[("config.json", "{}"), ("tokenizer.json", "{}")]);
    let missing = |name: &str| match hub(cache.path()).snapshot(MODEL) {
        Err(ModelError::Hub(HubError::Offline { file, .. })) => assert_eq!(file, name),
        other => panic!("{other:?}"),
    };
    missing("model.safetensors");
    fill(cache.path(), &[("model.safetensors.index.json", INDEX), ("1.safetensors", "")]);
    missing("2.safetensors");
    fill(cache.path(), &[("2.safetensors", "")]);
    let folder = hub(cache.path()).snapshot(MODEL).unwrap();
    assert!(folder.ends_with(COMMIT) && folder.join("config.json").is_file());
    let error = hub(&cache.path().join("other")).snapshot(MODEL).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE") && error.contains("`config.json`"), "{error}");
}

#[test]
fn downloads_what_is_not_there() {
    let cache = tempfile::tempdir().unwrap();
    let (address, log) = serve(&[
        ("config.json", "{\"a\": 1}"),
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{{ messages }}"),
        ("pytorch_model.bin", "never asked for"),
        ("model.safetensors.index.json", INDEX),
        ("1.safetensors", "one"),
        ("2.safetensors", "second"),
    ]);
    fill(cache.path(), &[("tokenizer.json", "{}")]);
    let online = Hub { endpoint: Some(address), offline: false, ..hub(cache.path()) };
    let folder = online.snapshot(MODEL).unwrap();
    assert_eq!(fs::read_to_string(folder.join("config.json")).unwrap(), "{\"a\": 1}");
    assert_eq!(fs::read_to_string(folder.join("2.safetensors")).unwrap(), "second");
    assert!(folder.join("chat_template.jinja").is_file());
    let asked = std::mem::take(&mut *log.lock().unwrap());
    assert!(!asked.iter().any(|path| path.contains("pytorch") || path.contains("tokenizer.json")));
    assert_eq!(online.snapshot(MODEL).unwrap(), folder);
    assert_eq!(hub(cache.path()).snapshot(MODEL).unwrap(), folder);
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn what_the_hub_lacks_is_a_typed_error() {
    let cache = tempfile::tempdir().unwrap();
    let (address, _) = serve(&[("config.json", "{}"), ("tokenizer.json", "{}")]);
    let online =
        |endpoint: String| Hub { endpoint: Some(endpoint), offline: false, ..hub(cache.path()) };
    let error = online(address.clone()).snapshot(MODEL).unwrap_err();
    assert!(
        matches!(error, ModelError::Hub(HubError::MissingFile { ref file, .. }) if file == "model.safetensors")
    );
    let error = online(address).snapshot("org/other").unwrap_err();
    assert!(matches!(error, ModelError::Hub(HubError::NotFound { status: 404, .. })), "{error}");
    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = online(format!("http://{free}")).snapshot("org/third").unwrap_err();
    assert!(matches!(error, ModelError::Hub(HubError::Unavailable { .. })), "{error}");
    assert!(error.to_string().contains("local folder"), "{error}");
}
