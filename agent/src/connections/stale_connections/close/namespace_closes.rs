//! Shell: closes of due connections in one network namespace, under their locks or by sock_diag.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use tracing::warn;

use super::{
    super::{DrainingAddress, is_due},
    client_ip,
};
use crate::{
    kernel::locked_close::{CloseCounts, LockedCloser},
    net::sockdiag::{DiagConnection, SockDiag},
};

/// Results of the closes in one namespace.
#[derive(Debug, Default)]
pub(super) struct NamespaceCloses {
    /// Numbers of connections by outcome.
    pub(super) counts: CloseCounts,
    /// Addresses of the clients of closed connections.
    pub(super) clients: BTreeSet<IpAddr>,
}

/// Closes connections of the calling thread's network namespace. `closes` grows by the outcomes, also if a later close
/// fails.
pub(super) fn close_in_namespace(
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    due: &[DiagConnection],
    locked_closer: Option<&mut LockedCloser>,
    closes: &mut NamespaceCloses,
) -> io::Result<()> {
    let Some(locked_closer) = locked_closer else { return close_unlocked(draining, due, closes) };
    let all: Vec<&DiagConnection> = due.iter().collect();
    let (mut counts, mut cookies) = (CloseCounts::default(), BTreeSet::new());
    let result = locked_closer.close(&all, &mut counts, &mut cookies);
    closes.counts.closed += counts.closed;
    let closed = due.iter().filter(|connection| cookies.contains(&connection.cookie()));
    closes.clients.extend(closed.map(client_ip));
    let Err(error) = result else {
        closes.counts.spared += counts.spared;
        return Ok(());
    };
    warn!(%error, "cannot close stale connections under their locks");
    // It judges those again that were spared.
    close_unlocked(draining, due, closes)
}

/// Closes connections on kernels that cannot check and close in one step: a request that is written in between is lost.
fn close_unlocked(
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    due: &[DiagConnection],
    closes: &mut NamespaceCloses,
) -> io::Result<()> {
    let diag = SockDiag::open()?;
    for connection in due {
        match close_if_due(&diag, draining, connection) {
            Ok(true) => {
                closes.counts.closed += 1;
                closes.clients.insert(client_ip(connection));
            }
            Ok(false) => closes.counts.spared += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Closes a connection if it is still due. A list of thousands is old when its end is reached, so the connection is
/// read again right before.
fn close_if_due(
    diag: &SockDiag,
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    connection: &DiagConnection,
) -> io::Result<bool> {
    let due = is_due(Instant::now(), draining, &diag.refresh(connection)?);
    if due {
        diag.destroy(connection)?;
    }
    Ok(due)
}
