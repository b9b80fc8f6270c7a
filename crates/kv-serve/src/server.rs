//! Listening, and ending in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kv_models::Engine;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::api::routes_of;
use crate::app::{App, Settings};

/// The time that answers have to reach their clients once all jobs have ended.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// Listens on an address.
///
/// # Errors
/// An address that is taken, or not this machine's.
pub async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let taken = error.kind() == std::io::ErrorKind::AddrInUse;
        let hint = "; another program listens there: end it, or choose another `--port`";
        let hint = if taken { hint } else { "" };
        anyhow::anyhow!("cannot listen on {address}: {error}{hint}")
    })
}

/// Serves until `end` comes: then no connections are taken any more, and requests that run have the
/// settings' `drain_timeout` to end.
///
/// # Errors
/// A listener that fails.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    settings: Settings,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let patience = settings.drain_timeout;
    let app = Arc::new(App::new(engine.clone(), settings));
    let (ending, mut ended) = watch::channel(false);
    let draining = Arc::clone(&app);
    let mut drain = tokio::spawn(async move {
        end.await;
        tracing::info!("ending: running requests have {patience:?}");
        draining.drain();
        let _ = ending.send(true);
        let done = tokio::task::spawn_blocking(move || engine.shut_down(patience)).await;
        match done {
            Ok(Ok(0)) => tracing::info!("all requests have ended"),
            Ok(Ok(count)) => tracing::warn!("{count} requests were cancelled"),
            Ok(Err(error)) => tracing::warn!("{error}"),
            Err(error) => tracing::warn!("{error}"),
        }
    });
    let server = axum::serve(listener, routes_of(app)).with_graceful_shutdown(async move {
        // The sender lives as long as the task, which ends behind the server.
        let _ = ended.wait_for(|ended| *ended).await;
    });
    let mut serving = std::pin::pin!(server.into_future());
    tokio::select! {
        served = &mut serving => {
            served.context("serving")?;
            drain.await.context("ending")?;
        }
        drained = &mut drain => {
            drained.context("ending")?;
            // Clients that do not read their answers hold nobody up for longer.
            match tokio::time::timeout(LAST_BYTES, serving).await {
                Ok(served) => served.context("serving")?,
                Err(_) => tracing::warn!("some clients have not read their answers"),
            }
        }
    }
    Ok(())
}

/// Comes with SIGTERM or Ctrl-C. A second one ends the process at once.
pub async fn end_signal() {
    one_signal().await;
    tokio::spawn(async {
        one_signal().await;
        // As shells have it of programs that an interrupt ended.
        std::process::exit(130);
    });
}

#[cfg(unix)]
async fn one_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        },
        Err(_) => {
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}

#[cfg(not(unix))]
async fn one_signal() {
    let _ = tokio::signal::ctrl_c().await;
}
