//! The page in a real browser.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{Method, StatusCode, header};
use axum::response::Html;
use axum::routing::{get, post};
use kv_serve::router;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::support::{NUMBER, request, server, settings, shared, text};

/// Programs that open the page, whichever is there.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// What a user does: asks for the sample's number, and waits for the answer and its picture.
const DRIVE: &str = r##"
const until = async (done) => { while (!done()) await new Promise((r) => setTimeout(r, 20)); };
const find = (selector) => document.querySelector(selector);
await until(() => document.documentElement.dataset.ready);
let pictures = 0;
const original = window.fetch;
window.fetch = (path, ...more) => {
  if (/requests\/\d+$/.test(path)) pictures += 1;
  return original(path, ...more);
};
find("#sample").click();
find("#prompt").value = find("#prompt").value.replace(/is \d{5}/, "is 21963");
find("#send").click();
await until(() => find(".assistant .meta")?.textContent.includes("instead of"));
document.documentElement.dataset.answer = find(".assistant .text").textContent;
// A short answer has a picture, too.
await until(() => find("#picture").dataset.kept);
find("#clear").click();
find("#prompt").value = "The sea was calm that day, and the old boat lay upon the sand. ";
find("#most").value = 1000;
find("#temperature").value = 1;
find("#send").click();
await until(() => find(".assistant .text")?.textContent.length > 40);
await until(() => find("#picture").dataset.kept && find("#requests .bar"));
find("#stop").click();
await until(() => !find("#send").disabled);
const before = pictures;
await new Promise((r) => setTimeout(r, 2000));
document.documentElement.dataset.pictures = `${before > 0} ${pictures - before}`;
find("#budget").value = "none";
find("#prompt").value = "x";
find("#send").click();
await until(() => find(".wrong"));
document.documentElement.dataset.back = find("#prompt").value;
document.documentElement.dataset.driven = "true";
await original("/end", { method: "POST" });
"##;

/// How long a user's visit may take. A browser shows what there is then.
const VISIT: Duration = Duration::from_secs(120);

/// A router that serves the page at `/driven`, together with the script [`DRIVE`].
///
/// The browser shows a page once all of it has loaded. This page has an image that is not answered
/// before the script's end: so the browser waits for the script, in real time.
fn driven() -> Router {
    let page = include_str!("../../assets/page/index.html")
        .replace("</head>", "<script type=\"module\" src=\"/drive.js\"></script></head>")
        .replace("</body>", "<img src=\"/wait\" alt=\"\" hidden></body>");
    let ended = Arc::new(Notify::new());
    let end = ended.clone();
    let wait = move || async move {
        let _ = timeout(VISIT, ended.notified()).await;
        StatusCode::NO_CONTENT
    };
    Router::new()
        .route("/driven", get(|| async { Html(page) }))
        .route("/drive.js", get(|| async { ([(header::CONTENT_TYPE, "text/javascript")], DRIVE) }))
        .route("/wait", get(wait))
        .route("/end", post(|| async move { end.notify_one() }))
}

/// A browser's name. Without one, the test is skipped, or fails where CI runs it.
fn browser() -> Option<&'static str> {
    let starts = |name: &&str| {
        let mut command = Command::new(name);
        let quiet = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        quiet.status().is_ok_and(|status| status.success())
    };
    let found = BROWSERS.into_iter().find(starts);
    if found.is_none() {
        let why = format!("no browser: none of {}", BROWSERS.join(", "));
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
        kv_testing::skip("the_page_works_in_a_browser", &why);
    }
    found
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere() {
    let server = server();
    for path in ["/", "/page/style.css", "/page/chat.js", "/page/api.js", "/page/caches.js"] {
        let (status, text) = text(&server, request(Method::GET, path, None)).await;
        assert_eq!(status.as_u16(), 200, "{path}");
        assert!(!text.contains("://"), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_works_in_a_browser() {
    let Some(browser) = browser() else { return };
    let app = driven().merge(router(shared(), settings()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(axum::serve(listener, app).into_future());
    let url = format!("http://{address}/driven");
    let open = move |more: Vec<String>| {
        let profile = tempfile::tempdir().unwrap();
        let output = Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--window-size=1280,900", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(more)
            .arg(&url)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let picture = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kv-serve-page.png");
    let shot = format!("--screenshot={}", picture.display());
    let opened = tokio::task::spawn_blocking(move || {
        // For people who want to look at it.
        open(vec![shot]);
        open(vec!["--dump-dom".into()])
    });
    let dom = opened.await.unwrap();
    serving.abort();
    assert!(dom.contains("data-driven=\"true\""), "{dom}");
    assert!(dom.contains(&format!("data-answer=\"{NUMBER}\"")), "{dom}");
    assert!(dom.contains("needle-1m on cpu") && dom.contains(">stopped<"), "{dom}");
    // Nobody asks for the picture of a job that has ended, but for its last one and the question on
    // its way.
    let is_left = |count| dom.contains(&format!("data-pictures=\"true {count}\""));
    assert!((0..=2).any(is_left), "{dom}");
    assert!(dom.contains("data-kept=\"[[") && dom.contains("none is no budget"), "{dom}");
    // What was refused can be sent again.
    assert!(dom.contains("data-back=\"x\""), "{dom}");
}
