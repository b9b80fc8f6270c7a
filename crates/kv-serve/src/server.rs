//! Listening, and ending in order.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kv_models::Engine;
use tokio::net::{TcpListener, TcpSocket};

use crate::api::routes_of;
use crate::app::{App, Settings};
use crate::connections::Connections;

/// Connections that the system keeps until they are taken; it may keep fewer. With too few, clients
/// that come all at once try again after a second.
const BACKLOG: u32 = 4096;

/// The time that answers have to reach their clients once all jobs have ended.
const LAST_BYTES: Duration = Duration::from_secs(5);
/// How long the engine may take to end once the patience with its jobs has.
const LAST_STEP: Duration = Duration::from_secs(10);

/// Listens on an address, within a runtime of tokio.
///
/// # Errors
/// An address that is taken, or not this machine's.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A port is free again as soon as its server has ended, but for Windows, where this would
        // let two servers share it.
        socket.set_reuseaddr(cfg!(unix))?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|error: io::Error| {
        let taken = error.kind() == io::ErrorKind::AddrInUse;
        let hint = "; another program listens there: end it, or choose another `--port`";
        let hint = if taken { hint } else { "" };
        anyhow::anyhow!("cannot listen on {address}: {error}{hint}")
    })
}

/// Serves the engine that comes of `loading` until `end` comes. Every request is answered with 503
/// until the engine is there. From the end on, new jobs are, and running ones have the settings'
/// `drain_timeout`.
///
/// # Errors
/// The error of `loading`, an `end` before the engine is there, and a task that fails.
pub async fn serve(
    mut listener: TcpListener,
    loading: impl Future<Output = Result<Engine>>,
    settings: Settings,
    end: impl Future<Output = ()>,
) -> Result<()> {
    let patience = settings.drain_timeout;
    let connections = Connections::new(&settings);
    let (mut loading, mut end) = (std::pin::pin!(loading), std::pin::pin!(end));
    let engine = loop {
        // In this order: connections that come when the engine is there are answered by it.
        tokio::select! {
            biased;
            engine = &mut loading => break engine?,
            () = &mut end => anyhow::bail!("ended before the model was loaded"),
            () = connections.serve_next(&mut listener) => {}
        }
    };
    let app = Arc::new(App::new(engine.clone(), settings, connections.count()));
    connections.answer_by(routes_of(Arc::clone(&app)));
    loop {
        tokio::select! {
            () = connections.serve_next(&mut listener) => {}
            () = &mut end => break,
        }
    }
    tracing::info!("ending: running requests have {patience:?}");
    app.drain();
    // A device, or another rank, may never answer.
    let ended = tokio::task::spawn_blocking(move || engine.shut_down(patience));
    let mut ended = std::pin::pin!(tokio::time::timeout(patience + LAST_STEP, ended));
    // Load balancers hear by `/ready` that no more requests are taken.
    let ended = loop {
        tokio::select! {
            () = connections.serve_next(&mut listener) => {}
            ended = &mut ended => break ended,
        }
    };
    drop(listener);
    let answered = tokio::spawn(connections.end());
    let Ok(ended) = ended else {
        tracing::error!("the engine does not end: its device, or another rank, does not answer");
        std::process::exit(1);
    };
    match ended {
        Ok(Ok(0)) => tracing::info!("all requests have ended"),
        Ok(Ok(count)) => tracing::warn!("{count} requests were cancelled"),
        Ok(Err(error)) => tracing::warn!("{error}"),
        Err(error) => tracing::warn!("{error}"),
    }
    // Clients that do not read their answers hold nobody up for longer.
    match tokio::time::timeout(LAST_BYTES, answered).await {
        Ok(answered) => answered.context("ending")?,
        Err(_) => tracing::warn!("some clients have not read their answers"),
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
