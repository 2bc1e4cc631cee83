//! Shell: `POST /busy`, by which the agent of a client's node asks which of the client's connections are in use.
//!
//! Question and answer are addresses, one a line: the client's ends of connections to this pod; those of them that have a
//! message under way. A client's node sees when bytes went by, not what they mean: a response that pauses looks to it
//! like one that has ended. The kernel half on the pod's node follows the messages.
//!
//! Anybody who reaches the pod may ask, and learns whether a connection that he can name is in use, no more.

use std::{
    collections::BTreeSet,
    io,
    net::{AddrParseError, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use tokio::{task::spawn_blocking, time::sleep};
use tracing::warn;

use super::Asked;
use crate::{maps::conns::Conns, sockdiag::SockDiag};

/// What is asked for.
pub(crate) const PATH: &str = "/busy";
/// Most bytes of a question or an answer.
pub(crate) const MOST_BYTES: usize = 64 * 1024;
/// Most addresses in one. None is written in more than 47 bytes, and an end of line.
pub(crate) const MOST: usize = 1_000;
/// Rest after each look, so that whoever asks all the time costs little.
const REST: Duration = Duration::from_millis(5);

/// A list of addresses as it is sent.
pub(crate) fn write(addresses: impl IntoIterator<Item = SocketAddr>) -> String {
    addresses.into_iter().map(|at| format!("{at}\n")).collect()
}

/// A list of addresses as it was sent.
pub(crate) fn read(text: &str) -> Result<BTreeSet<SocketAddr>, AddrParseError> {
    text.lines().map(str::parse).collect()
}

/// Where a door looks up what its pod's connections do. Cheap to clone; one looks at a time.
#[derive(Clone, Debug)]
pub(super) struct Books {
    /// In the pod's namespace.
    diag: Arc<Mutex<SockDiag>>,
    conns: Conns,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Books {
    pub(super) fn new(diag: SockDiag, conns: Conns) -> Self {
        Self { diag: Arc::new(Mutex::new(diag)), conns, turn: Arc::default() }
    }

    /// The clients whose connection has a message under way at one moment from now on.
    async fn busy(&self) -> io::Result<BTreeSet<SocketAddr>> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let Self { diag, conns, .. } = self.clone();
        let look = move || conns.busy(&diag.lock().unwrap_or_else(PoisonError::into_inner));
        let found = spawn_blocking(look).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            sleep(REST).await;
            drop(turn);
        });
        found
    }
}

/// Answers at once.
pub(super) async fn answer(State(asked): State<Asked>, question: String) -> Response {
    let clients = match read(&question) {
        Ok(clients) => clients,
        Err(error) => {
            let rule = format!("one address and port a line: {error}\n");
            return (StatusCode::BAD_REQUEST, rule).into_response();
        }
    };
    match asked.books.busy().await {
        Ok(busy) => write(clients.intersection(&busy).copied()).into_response(),
        Err(error) => {
            warn!(uid = asked.uid, %error, "cannot look which connections are in use");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written_or_not_at_all() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let list = BTreeSet::from([at("10.0.0.1:80"), at("[fd00::1]:65535")]);
        assert_eq!(read(&write(list.clone())).expect("as written"), list);
        assert_eq!(read("").expect("nothing"), BTreeSet::new());
        for bad in ["10.0.0.1", "10.0.0.1:80\n\n", "10.0.0.1:65536", "a:1"] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_longest_list_fits() {
        let longest = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse();
        let list = std::iter::repeat_n(longest.expect("an address"), MOST);
        assert!(write(list).len() <= MOST_BYTES);
    }
}
