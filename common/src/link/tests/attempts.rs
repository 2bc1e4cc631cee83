//! Attempts that fail late: they count as failures, not as streams that were established.

use std::{future::pending, time::Duration};

use tokio::{net::UnixListener, time::Instant};

use super::*;

/// Attempts of each test; the wait after the last one is at its maximum of a second, less the jitter.
const ATTEMPTS: usize = 9;
const LEAST_LAST_WAIT: Duration = Duration::from_millis(500);

fn unix_link(path: &std::path::Path) -> ComponentLink {
    let subscriber =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    ComponentLink::new(format!("unix:{}", path.display()), subscriber, CancellationToken::new())
}

/// Returns the wait before the last of [`ATTEMPTS`] attempts, each of which lasts so long and is open at its end or not.
async fn last_wait(lasts: Duration, opens: bool) -> Duration {
    let link = unix_link(&socket("late"));
    let (send, mut begins) = mpsc::channel(ATTEMPTS);
    let send = &send;
    let streams = link.keep_streams_to_all(|endpoint, attempt| async move {
        if send.try_send(Instant::now()).is_err() {
            pending::<()>().await;
        }
        if opens {
            attempt.record_open();
        }
        tokio::time::sleep(lasts).await;
        Err(LinkError::TableTimeout { endpoint: endpoint.to_string() })
    });
    let all = async {
        let mut all = Vec::new();
        while all.len() < ATTEMPTS {
            begins.recv_many(&mut all, 1).await;
        }
        all
    };
    tokio::select! {
        () = streams => unreachable!("the link is not shut down"),
        all = all => all[ATTEMPTS - 1] - all[ATTEMPTS - 2] - lasts,
    }
}

#[tokio::test(start_paused = true)]
async fn a_dial_that_fails_late_is_no_established_stream() {
    let late = Duration::from_secs(3);
    assert!(last_wait(late, false).await >= LEAST_LAST_WAIT);
    assert!(last_wait(late, true).await < LEAST_LAST_WAIT, "the stream was open meanwhile");
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_sends_no_table_was_not_established() {
    let path = socket("silent");
    let listener = UnixListener::bind(&path).expect("a socket");
    let link = unix_link(&path);
    let accepts = async {
        let mut accepted = Vec::new();
        while accepted.len() < ATTEMPTS {
            // Kept open, and never answered.
            let (connection, _) = listener.accept().await.expect("a connection");
            accepted.push((Instant::now(), connection));
        }
        accepted[ATTEMPTS - 1].0 - accepted[ATTEMPTS - 2].0
    };
    tokio::select! {
        () = link.watch_batches(drop) => unreachable!("the link is not shut down"),
        gap = accepts => assert!(gap >= Duration::from_secs(10) + LEAST_LAST_WAIT, "{gap:?}"),
    }
    let _ = std::fs::remove_file(path);
}
