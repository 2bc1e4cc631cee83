//! Shell: forwards connections from a listener on the host into the cluster's namespace.
//!
//! A socket stays in the namespace where it was created. xtask creates the listener on the host's loopback and passes
//! it as standard input to this command, which it starts inside. Accepted connections come from the host; dialled
//! connections start in the cluster.

use std::{net::SocketAddr, os::fd::AsFd as _};

use anyhow::{Context as _, Result};
use tokio::net::{TcpListener, TcpStream};

/// Forwards connections until the process is killed.
pub(crate) fn run(address: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let fd = std::io::stdin().as_fd().try_clone_to_owned().context("no listener was handed in")?;
    let listener = std::net::TcpListener::from(fd);
    listener.set_nonblocking(true).context("standard input is no listener")?;
    runtime.block_on(accept_connections(listener, address))
}

async fn accept_connections(listener: std::net::TcpListener, address: SocketAddr) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let Ok((near, _)) = listener.accept().await else {
            // Out of descriptors: closing connections return some, so accepting goes on.
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            continue;
        };
        tokio::spawn(forward_connection(near, address));
    }
}

async fn forward_connection(mut near: TcpStream, address: SocketAddr) {
    let Ok(mut far) = TcpStream::connect(address).await else { return };
    let (_, _) = (near.set_nodelay(true), far.set_nodelay(true));
    // Either side may close at any time; `copy_bidirectional` passes the close on, and an error means the same.
    let _closed = tokio::io::copy_bidirectional(&mut near, &mut far).await;
}
