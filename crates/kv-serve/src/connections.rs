//! Connections of clients, each within limits of number and time.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::api::routes_of;
use crate::app::App;
use crate::metrics::Metrics;

/// What serves connections.
pub(crate) struct Connections {
    http: http1::Builder,
    service: TowerToHyperService<Router>,
    /// A permit for each connection that may be open.
    places: Arc<Semaphore>,
    open: GracefulShutdown,
    /// How long a client may take none of an answer's bytes.
    patience: Duration,
    metrics: Arc<Metrics>,
}

impl Connections {
    pub(crate) fn new(app: &Arc<App>) -> Self {
        let settings = &app.settings;
        let mut http = http1::Builder::new();
        // The time begins with the connection, and again after each answer: it ends connections
        // that send nothing, half of a head, or no further request.
        http.timer(TokioTimer::new()).header_read_timeout(settings.client_timeout);
        Self {
            http,
            service: TowerToHyperService::new(routes_of(Arc::clone(app))),
            places: Arc::new(Semaphore::new(settings.max_connections.min(Semaphore::MAX_PERMITS))),
            open: GracefulShutdown::new(),
            patience: settings.client_timeout,
            metrics: Arc::clone(&app.metrics),
        }
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
        let served = self.open.watch(self.http.serve_connection(stream, self.service.clone()));
        let metrics = Arc::clone(&self.metrics);
        metrics.opened();
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!("a connection has failed: {error}");
            }
            metrics.closed();
            drop(place);
        });
    }

    /// Lets each connection end after the answer that it waits for, and waits for all.
    pub(crate) async fn end(self) {
        self.open.shutdown().await;
    }
}
