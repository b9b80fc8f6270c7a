use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use super::{Hub, parts, select};
use crate::TaskError;

const COMMIT: &str = "0123abc";

fn hub(cache: &Path) -> Hub {
    Hub {
        cache: cache.into(),
        endpoint: None,
        token: None,
        offline: true,
        repository: "org/name".into(),
        revision: "main".into(),
    }
}

/// A cached snapshot of `files`.
fn fill(cache: &Path, files: &[&str]) {
    let repo = cache.join("datasets--org--name");
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for name in files {
        let path = repo.join("snapshots").join(COMMIT).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "{}").unwrap();
    }
}

fn patterns(patterns: &[&str]) -> Vec<String> {
    patterns.iter().map(|pattern| pattern.to_string()).collect()
}

/// Answers as the hub does, for one data set; returns its address.
fn serve(files: &[(&str, &str)]) -> String {
    let files: BTreeMap<_, _> =
        files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.unwrap(), &files);
        }
    });
    address
}

fn answer(mut stream: TcpStream, files: &BTreeMap<String, String>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_string();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let from = headers.iter().find_map(|line| line.strip_prefix("Range: bytes="));
    let (status, extra, body) = if path == "/api/datasets/org/name/revision/main" {
        let siblings: Vec<_> =
            files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"siblings": siblings, "sha": COMMIT});
        ("200 OK", String::new(), info.to_string())
    } else if let Some(text) =
        path.strip_prefix("/datasets/org/name/resolve/main/").and_then(|file| files.get(file))
    {
        let (from, to) = from.unwrap().split_once('-').unwrap();
        let from: usize = from.parse().unwrap();
        let to = to.parse().map_or(text.len(), |to: usize| text.len().min(to + 1));
        let whole = text.len();
        let range = format!(
            "ETag: \"etag-{whole}\"\r\nX-Repo-Commit: {COMMIT}\r\n\
             Content-Range: bytes {from}-{}/{whole}\r\n",
            to - 1
        );
        ("206 Partial Content", range, text[from..to].to_string())
    } else {
        ("404 Not Found", String::new(), String::new())
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\n{extra}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .unwrap();
}

#[test]
fn parts_are_counted() {
    assert_eq!(parts("data/train-00000-of-00003.parquet"), Some(3));
    assert_eq!(parts("test.jsonl"), None);
    let files = patterns(&["a/t-00001-of-00002.parquet", "a/t-00000-of-00002.parquet", "b.json"]);
    let found = select(&files, &patterns(&["a/t-*.parquet"])).unwrap();
    assert_eq!(found, ["a/t-00000-of-00002.parquet", "a/t-00001-of-00002.parquet"]);
    assert_eq!(select(&files[..1], &patterns(&["a/*"])), Err("a/*".into()));
    assert_eq!(select(&files, &patterns(&["*.json", "c*"])), Err("c*".into()));
    assert_eq!(select(&files, &patterns(&["**/t-*"])).unwrap().len(), 2);
}

#[test]
fn the_cache_serves_without_the_hub() {
    let cache = tempfile::tempdir().unwrap();
    let error = hub(cache.path()).files(&patterns(&["a.json"])).unwrap_err();
    assert!(matches!(error, TaskError::Offline { .. }), "{error}");
    fill(cache.path(), &["a.json", "data/t-00000-of-00002.parquet"]);
    let found = hub(cache.path()).files(&patterns(&["a.json"])).unwrap();
    assert!(found.len() == 1 && found[0].ends_with("a.json"));
    let error = hub(cache.path()).files(&patterns(&["data/*"])).unwrap_err();
    assert!(matches!(&error, TaskError::Offline { missing, .. } if missing == "data/*"), "{error}");
}

#[test]
fn files_are_downloaded_once() {
    let cache = tempfile::tempdir().unwrap();
    let address = serve(&[("test.jsonl", "{\"a\":1}\n"), ("other.txt", "x")]);
    let online = Hub { endpoint: Some(address), offline: false, ..hub(cache.path()) };
    let found = online.files(&patterns(&["test*"])).unwrap();
    assert_eq!(fs::read_to_string(&found[0]).unwrap(), "{\"a\":1}\n");
    let error = online.files(&patterns(&["train*"])).unwrap_err();
    assert!(matches!(error, TaskError::NotInDataSet { .. }), "{error}");
    assert_eq!(hub(cache.path()).files(&patterns(&["test*"])).unwrap(), found);
    let unknown = Hub { repository: "org/other".into(), ..online };
    let error = unknown.files(&patterns(&["test*"])).unwrap_err();
    assert!(matches!(error, TaskError::NotOnHub { status: 404, .. }), "{error}");
}
