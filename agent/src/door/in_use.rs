//! Shell: `POST /in-use`, by which the agent of a client's node asks which of the client's connections are in use.
//!
//! The question is a list of addresses, one a line: the client's ends of connections to this pod. The answer has a line
//! `busy ADDRESS` for each that has a message under way, `idle ADDRESS` for each that has none, and `no-request ADDRESS` where
//! no request is, but perhaps a frame of HTTP/2. Connections whose messages are not followed have no line.
//! A client's node sees when bytes went by, not what they mean: a response that pauses looks to it like one that has
//! ended. The kernel half on the pod's node follows the messages.
//!
//! Anybody who reaches the pod may ask, and learns whether a connection that he can name is in use, no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{AddrParseError, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use common::abi::InUse;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::warn;

use super::Asked;
use crate::{lock, maps::conns::Conns, sockdiag::SockDiag};

/// What is asked for.
pub(crate) const PATH: &str = "/in-use";
/// Most bytes of a question or an answer.
pub(crate) const MOST_BYTES: usize = 64 * 1024;
/// Most addresses in one. None is written in more than 47 bytes, a word in 11, and an end of line.
pub(crate) const MOST: usize = 1_000;
/// Rest after each look, so that whoever asks all the time costs little.
const REST: Duration = Duration::from_millis(5);

/// A question as it is sent.
pub(crate) fn question(clients: &[SocketAddr]) -> String {
    clients.iter().map(|at| format!("{at}\n")).collect()
}

/// A question as it was sent.
fn asked_for(question: &str) -> Result<BTreeSet<SocketAddr>, AddrParseError> {
    question.lines().map(str::parse).collect()
}

/// How an answer begins the line of a connection.
const WORDS: [(InUse, &str); 3] =
    [(InUse::Yes, "busy"), (InUse::No, "idle"), (InUse::NoRequest, "no-request")];

fn write(in_use: impl IntoIterator<Item = (SocketAddr, InUse)>) -> String {
    let word = |known| WORDS.iter().find(|(it, _)| *it == known).map_or("", |(_, word)| word);
    in_use.into_iter().map(|(at, known)| format!("{} {at}\n", word(known))).collect()
}

/// The answer: of each client that is known, what its connection is in the middle of. `None` if it is no answer.
pub(crate) fn read(answer: &str) -> Option<BTreeMap<SocketAddr, InUse>> {
    let line = |line: &str| {
        let (said, at) = line.split_once(' ')?;
        let (known, _) = WORDS.into_iter().find(|(_, word)| *word == said)?;
        Some((at.parse().ok()?, known))
    };
    answer.lines().map(line).collect()
}

/// Where a door looks up what its pod's connections do. Cheap to clone.
///
/// One looks at a time. Who asks meanwhile waits for the next look, which answers all that wait: however many nodes ask,
/// each has its answer two looks later.
#[derive(Clone, Debug)]
pub(super) struct Books {
    /// In the pod's namespace.
    diag: Arc<Mutex<SockDiag>>,
    conns: Conns,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// What the look that has not begun yet will find.
    next: Arc<Mutex<Option<watch::Receiver<Option<Found>>>>>,
}

/// Of each client that is known, what its connection is in the middle of; or why that cannot be seen.
type Found = Arc<io::Result<BTreeMap<SocketAddr, InUse>>>;

impl Books {
    pub(super) fn new(diag: SockDiag, conns: Conns) -> Self {
        let diag = Arc::new(Mutex::new(diag));
        Self { diag, conns, turn: Arc::default(), next: Arc::default() }
    }

    /// What there is at one moment from now on. `None` when the runtime ends.
    async fn in_use(&self) -> Option<Found> {
        let mut found = {
            let mut next = lock(&self.next);
            next.get_or_insert_with(|| self.plan_look()).clone()
        };
        found.wait_for(Option::is_some).await.ok()?.clone()
    }

    fn plan_look(&self) -> watch::Receiver<Option<Found>> {
        let (tell, found) = watch::channel(None);
        let books = self.clone();
        tokio::spawn(async move {
            let _turn = books.turn.lock().await;
            // Whoever asks from here on may not have what was seen before.
            lock(&books.next).take();
            let Self { diag, conns, .. } = books.clone();
            let look = spawn_blocking(move || conns.in_use(&lock(&diag)));
            let seen = look.await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
            tell.send_replace(Some(Arc::new(seen)));
            sleep(REST).await;
        });
        found
    }
}

/// Answers at once.
pub(super) async fn answer(State(asked): State<Asked>, question: String) -> Response {
    let clients = match asked_for(&question) {
        Ok(clients) => clients,
        Err(error) => {
            let rule = format!("one address and port a line: {error}\n");
            return (StatusCode::BAD_REQUEST, rule).into_response();
        }
    };
    match asked.books.in_use().await.as_deref() {
        Some(Ok(all)) => {
            let of_those = all.iter().filter(|(client, _)| clients.contains(client));
            write(of_those.map(|(client, known)| (*client, *known))).into_response()
        }
        other => {
            warn!(uid = asked.uid, ?other, "cannot look which connections are in use");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_question_is_read_as_it_was_written_or_not_at_all() {
        let clients = [at("10.0.0.1:80"), at("[fd00::1]:65535")];
        assert_eq!(asked_for(&question(&clients)).expect("as written"), clients.into());
        assert_eq!(asked_for("").expect("nothing"), BTreeSet::new());
        for bad in ["10.0.0.1", "10.0.0.1:80\n\n", "10.0.0.1:65536", "a:1"] {
            assert!(asked_for(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_answer_is_read_as_it_was_written_or_not_at_all() {
        let all = BTreeMap::from([
            (at("10.0.0.1:80"), InUse::Yes),
            (at("[fd00::1]:65535"), InUse::No),
            (at("[fd00::1]:1"), InUse::NoRequest),
        ]);
        assert_eq!(read(&write(all.clone())), Some(all));
        assert_eq!(read(""), Some(BTreeMap::new()));
        for bad in ["10.0.0.1:80", "busy", "busy 10.0.0.1", "lazy 10.0.0.1:80", "<html>"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn who_asks_while_others_wait_has_the_answer_of_one_look_with_them() {
        let books = Books::new(SockDiag::open().expect("netlink"), Conns::default());
        let busy = books.turn.clone().lock_owned().await;
        let asked: Vec<_> = (0..100)
            .map(|_| {
                let books = books.clone();
                tokio::spawn(async move { books.in_use().await.expect("an answer") })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(busy);
        let mut found = Vec::new();
        for asked in asked {
            found.push(asked.await.expect("no panic"));
        }
        assert!(found.iter().all(|it| Arc::ptr_eq(it, &found[0])), "one look");
        let later = books.in_use().await.expect("an answer");
        assert!(!Arc::ptr_eq(&later, &found[0]), "another one");
    }

    #[test]
    fn the_longest_answer_fits() {
        let longest = at("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
        assert!(write(std::iter::repeat_n((longest, InUse::NoRequest), MOST)).len() <= MOST_BYTES);
    }
}
