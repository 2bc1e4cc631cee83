//! Shell: listens, gives each connection to hyper, and exits on SIGTERM after the last response.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};

use hyper::{rt::Executor, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    app::{HelloApp, sleep},
    config::HelloConfig,
    echo,
    request_counts::HelloCounts,
    request_ids::RequestIdFile,
    respond::respond,
};

/// Requested length of the accept queue; the kernel caps it at `net.core.somaxconn`.
const BACKLOG: u32 = 4096;
/// Longest wait for open connections and requests in flight after SIGTERM.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves until SIGTERM, then finishes the requests in flight.
pub(crate) async fn run(config: HelloConfig) -> io::Result<()> {
    let (started, started_us) = (Instant::now(), unix_us());
    // Before the delay: as PID 1 the process would otherwise ignore SIGTERM until it listens.
    let mut term = signal(SignalKind::terminate())?;
    sleep(config.listen_delay).await;
    let ids = RequestIdFile::open(config.ids.as_deref(), &config.pod)?;
    let listener = listen(&config, config.http_port())?;
    let echo_listener = listen(&config, config.echo_port)?;
    let listening_us = unix_us();
    let HelloConfig { ignore_term, exit_on_term, exit_after, .. } = config;
    let exit_at = exit_after.map(|wait| started + wait);
    let counts = HelloCounts::default();
    let app = Rc::new(HelloApp { config, counts, ids, started, started_us, listening_us });
    let (shutdown_tx, shutdown_rx) = watch::channel(false);
    let tasks = tokio::task::LocalSet::new();
    tasks
        .run_until(async {
            loop {
                tokio::select! {
                    // An accept error (no file descriptors left) passes, so the server continues.
                    peer = accept_or_never(listener.as_ref()) => match peer {
                        Ok((stream, peer)) => {
                            app.counts.record_connection();
                            tokio::task::spawn_local(serve_connection(stream, peer, app.clone(), shutdown_rx.clone()));
                        }
                        Err(error) => println!("hello: cannot accept: {error}"),
                    },
                    peer = accept_or_never(echo_listener.as_ref()) => match peer {
                        Ok((stream, peer)) => {
                            app.counts.record_connection();
                            tokio::task::spawn_local(serve_echo(stream, peer, app.clone()));
                        }
                        Err(error) => println!("hello: cannot accept: {error}"),
                    },
                    _ = term.recv(), if !ignore_term => break,
                    () = sleep_until_or_never(exit_at) => return Err(io::Error::other("HELLO_EXIT_AFTER_MS has passed")),
                }
            }
            Ok(())
        })
        .await?;
    if exit_on_term {
        return Ok(());
    }
    // The listeners first, so that new connections go to other pods from now on.
    drop((listener, echo_listener));
    shutdown_tx.send_replace(true);
    drop(shutdown_rx);
    if tokio::time::timeout(SHUTDOWN_TIMEOUT, tasks).await.is_err() {
        println!("hello: left with requests in flight");
    }
    println!("hello: {}", app.counts.to_json(&app.config.pod));
    Ok(())
}

fn unix_us() -> u128 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros())
}

async fn sleep_until_or_never(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end.into()).await,
        None => std::future::pending().await,
    }
}

async fn accept_or_never(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// Listens on a port; `None` without a port, or if the configuration forbids it.
fn listen(config: &HelloConfig, port: Option<u16>) -> io::Result<Option<TcpListener>> {
    let Some(address) = port.and_then(|it| config.listen.address(it)) else { return Ok(None) };
    let bound = bind_listener(address).or_else(|error| match address.ip() {
        // A pod without IPv6 still serves IPv4.
        IpAddr::V6(ip) if ip.is_unspecified() => {
            bind_listener(SocketAddr::from(([0; 4], address.port())))
        }
        _ => Err(error),
    });
    bound.map(Some)
}

fn bind_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Executor that runs the streams of an HTTP/2 connection on the only thread.
#[derive(Clone, Copy, Debug)]
struct LocalExecutor;

impl<F: Future<Output: 'static> + 'static> Executor<F> for LocalExecutor {
    fn execute(&self, stream: F) {
        tokio::task::spawn_local(stream);
    }
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    app: Rc<HelloApp>,
    mut shutdown: watch::Receiver<bool>,
) {
    // Small responses would otherwise wait for the client's delayed acknowledgement.
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| respond(request, peer, app.clone()));
    let mut builder = auto::Builder::new(LocalExecutor);
    builder.http1().timer(TokioTimer::new());
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = shutdown.wait_for(|shutdown| *shutdown) => connection.as_mut().graceful_shutdown(),
    }
    // An error here is the client's reset, and there is no connection to report it on.
    let _ = connection.await;
}

async fn serve_echo(stream: TcpStream, peer: SocketAddr, app: Rc<HelloApp>) {
    // One connection is one request, as Rouse counts those of protocols that it does not read.
    let _guard = app.counts.begin_request();
    // An error is the client's reset, and there is no connection to report it on.
    let _ = echo::greet_and_echo(stream, peer, &app.config.pod).await;
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn connections_do_not_delay_the_exit() {
        let free = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let variables = |name: &str| match name {
            "PORT" => Some(address.port().to_string()),
            "HELLO_LISTEN" => Some("loopback".to_owned()),
            "HELLO_EXIT_AFTER_MS" => Some("100".to_owned()),
            _ => None,
        };
        let config = HelloConfig::from_lookup(variables).unwrap();
        let connect = async {
            for _ in 0..200 {
                drop(TcpStream::connect(address).await);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let exit = tokio::select! {
            exit = run(config) => exit.unwrap_err().to_string(),
            () = connect => "none after 200 connections".to_owned(),
        };
        assert_eq!(exit, "HELLO_EXIT_AFTER_MS has passed");
    }
}
