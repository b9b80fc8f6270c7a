//! Connections of clients, each within limits of number and time.
//!
//! They are taken before the model is loaded. Until then every request is answered with 503, which
//! is a page at `/`.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::app::Settings;
use crate::error::ApiError;
use crate::page;

/// What serves connections.
pub(crate) struct Connections {
    http: http1::Builder,
    /// The routes, once the model is loaded.
    routes: Arc<OnceLock<TowerToHyperService<Router>>>,
    /// A permit for each connection that may be open.
    places: Arc<Semaphore>,
    open: GracefulShutdown,
    /// How long a client may take none of an answer's bytes.
    patience: Duration,
    /// How many are open.
    count: Gauge,
}

impl Connections {
    pub(crate) fn new(settings: &Settings) -> Self {
        let mut http = http1::Builder::new();
        // The time begins with the connection, and again after each answer: it ends connections
        // that send nothing, half of a head, or no further request.
        http.timer(TokioTimer::new()).header_read_timeout(settings.client_timeout);
        Self {
            http,
            routes: Arc::default(),
            places: Arc::new(Semaphore::new(settings.max_connections.min(Semaphore::MAX_PERMITS))),
            open: GracefulShutdown::new(),
            patience: settings.client_timeout,
            count: Gauge::default(),
        }
    }

    /// How many connections are open.
    pub(crate) fn count(&self) -> Gauge {
        self.count.clone()
    }

    /// Answers requests by these routes from now on, on all connections.
    pub(crate) fn answer_by(&self, routes: Router) {
        // Only the first call counts.
        let _ = self.routes.set(TowerToHyperService::new(routes));
    }

    /// Serves the next connection on a task of its own. Waits while as many are open as may be;
    /// the system lets further clients wait.
    pub(crate) async fn serve_next(&self, listener: &mut TcpListener) {
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { return };
        let (stream, _) = Listener::accept(listener).await;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("small packets are delayed: {error}");
        }
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.patience));
        let stream = TokioIo::new(Box::pin(stream));
        let routes = Arc::clone(&self.routes);
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            let routes = routes.get().cloned();
            async move {
                match routes {
                    Some(routes) => routes.call(request).await,
                    None => Ok::<_, Infallible>(loading(request.uri().path())),
                }
            }
        });
        let served = self.open.watch(self.http.serve_connection(stream, service));
        let count = self.count();
        count.inc();
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!("a connection has failed: {error}");
            }
            count.dec();
            drop(place);
        });
    }

    /// Lets each connection end after the answer that it waits for, and waits for all.
    pub(crate) async fn end(self) {
        self.open.shutdown().await;
    }
}

/// The answer until the model is loaded.
fn loading(path: &str) -> Response {
    match path {
        "/" => page::loading(),
        _ => ApiError::unavailable("the model is being loaded").into_response(),
    }
}
