//! Shell: watches of the Kubernetes API without end.
//!
//! kube's watcher resumes a watch where it broke, and lists again if the API server has dropped that version (410).
//! [`watch_events`] adds the pauses after errors, and [`watch_streamed`] a first list that needs little memory.
#![warn(missing_docs)]

use std::{fmt::Debug, time::Duration};

use futures::{Stream, StreamExt as _, future::Either, stream};
use kube::{
    Api,
    runtime::{
        utils::Backoff as _,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use serde::de::DeserializeOwned;

/// Longest time without a byte of the API server, which sends a bookmark to each watch once a minute.
const READ_TIMEOUT: Duration = Duration::from_secs(90);
/// Longest time for a connection to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bounds the time for which a client with this configuration waits for a silent API server.
///
/// Without a bound, a watch of a host that has lost its power or its network would be noticed minutes later. Until then
/// the objects that it had seen last would count as the present ones.
pub fn bound_silence(config: &mut kube::Config) {
    config.read_timeout = Some(READ_TIMEOUT);
    // A request that is sent on a kept connection has the whole time for its answer.
    config.reset_reader_on_write = true;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
}

/// Returns the events of a watch without end. After an error the next attempt waits: random, growing delays, up to
/// `max_pause`.
pub fn watch_events<K>(
    api: Api<K>,
    config: watcher::Config,
    max_pause: Duration,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    pause_after_errors(watcher(api, config), max_pause)
}

/// Returns the events of a watch like [`watch_events`], for watchers on every node.
///
/// The first objects come as events of the watch, one by one (KEP-3157). So neither side holds a whole list, and none
/// is read from etcd. API servers before 1.32 refuse that. For them the list comes from the server's cache in one piece.
/// `config` must not set how lists are made.
pub fn watch_streamed<K>(
    api: Api<K>,
    config: watcher::Config,
    max_pause: Duration,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let streamed = Box::pin(watcher(api.clone(), config.clone().streaming_lists()));
    let fallback = move || Box::pin(watcher(api.clone(), config.clone().any_semantic()));
    pause_after_errors(replace_if_refused(streamed, fallback), max_pause)
}

/// Returns the events of `streamed`, or of a `fallback` from the error on by which the API server refuses to stream
/// lists.
fn replace_if_refused<K, S, F>(
    streamed: S,
    fallback: impl FnOnce() -> F + Send,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    S: Stream<Item = watcher::Result<Event<K>>> + Send + Unpin,
    F: Stream<Item = watcher::Result<Event<K>>> + Send + Unpin,
    K: Send,
{
    let state = (Either::Left(streamed), Some(fallback));
    stream::unfold(state, |(mut events, mut fallback)| async move {
        let event = events.next().await?;
        // The refusal is not passed on: it is answered by the fallback, and no outage.
        if event.as_ref().is_err_and(refuses_streamed_list)
            && let Some(fallback) = fallback.take()
        {
            let mut events = Either::Right(fallback());
            let event = events.next().await?;
            return Some((event, (events, None)));
        }
        Some((event, (events, fallback)))
    })
}

/// Returns true if the error shows that the API server does not stream lists: it knows the parameter and forbids it
/// (422), or takes the whole request for a bad one (400).
fn refuses_streamed_list(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
            status.code == 422 || status.code == 400
        }
        _ => false,
    }
}

/// Pauses `events` after each error.
///
/// kube's own `backoff` resets the delays at each event. But its watcher yields [`Event::Init`] before it requests a
/// list, so they would never grow while lists fail.
fn pause_after_errors<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
    max_pause: Duration,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Send,
{
    let state = (Box::pin(events), DefaultBackoff::default(), None);
    stream::unfold(state, move |(mut events, mut backoff, pause)| async move {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        let event = events.next().await?;
        let next_pause = match &event {
            Err(_) => Some(backoff.next().map_or(max_pause, |it| it.min(max_pause))),
            Ok(event) => {
                // Not each event proves it: `Init` comes before any request.
                if proves_recovery(event) {
                    backoff.reset();
                }
                None
            }
        };
        Some((event, (events, backoff, next_pause)))
    })
}

/// Outage of one watch: it begins with an error, and ends when an event shows that the watch works.
///
/// The watcher tries again many times, and each attempt yields an error. A log names an outage once.
#[derive(Debug, Default)]
pub struct WatchOutage {
    is_open: bool,
}

/// Change that an event makes to an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutageChange {
    /// The first error after the watch worked.
    Began,
    /// The first event that proves that the watch works again. A resumed watch of quiet objects yields it late.
    Ended,
}

impl WatchOutage {
    /// Records an event of the watch, and returns the change that it makes.
    pub fn record<K>(&mut self, event: &watcher::Result<Event<K>>) -> Option<OutageChange> {
        let was_open = self.is_open;
        match event {
            Err(_) => self.is_open = true,
            Ok(event) if proves_recovery(event) => self.is_open = false,
            Ok(_) => {}
        }
        match (was_open, self.is_open) {
            (false, true) => Some(OutageChange::Began),
            (true, false) => Some(OutageChange::Ended),
            _ => None,
        }
    }
}

/// Returns true if the event shows that a list is complete or that a watch is open. [`Event::Init`] precedes each
/// request of a list, and the first page of a list may come although the second one fails.
const fn proves_recovery<K>(event: &Event<K>) -> bool {
    match event {
        Event::Init | Event::InitApply(_) => false,
        Event::InitDone | Event::Apply(_) | Event::Delete(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use tokio::time::Instant;

    use super::*;

    type ScriptedEvent = watcher::Result<Event<u8>>;

    /// Number of failures after which the delay is the longest one.
    const FAILURES: usize = 20;
    const MAX_PAUSE: Duration = Duration::from_secs(5);

    fn broken_watch() -> ScriptedEvent {
        Err(watcher::Error::NoResourceVersion)
    }

    #[test]
    fn outage_begins_and_ends_once() {
        let mut outage = WatchOutage::default();
        let mut record = |event: ScriptedEvent| outage.record(&event);
        assert_eq!(record(Ok(Event::InitDone)), None);
        assert_eq!(record(broken_watch()), Some(OutageChange::Began));
        assert_eq!(record(broken_watch()), None);
        // A new list that has begun may still fail.
        assert_eq!(record(Ok(Event::Init)), None);
        assert_eq!(record(Ok(Event::InitApply(1))), None);
        assert_eq!(record(broken_watch()), None);
        assert_eq!(record(Ok(Event::InitDone)), Some(OutageChange::Ended));
        assert_eq!(record(Ok(Event::Apply(1))), None);
        assert_eq!(record(broken_watch()), Some(OutageChange::Began));
    }

    /// Returns the error of a watch that the API server refused with this status code.
    fn refused(code: u16) -> ScriptedEvent {
        let status = Status { code, ..Status::failure("refused", "Invalid") };
        Err(watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status))))
    }

    /// Returns the delays after the errors of a watch that yields these events, in simulated time.
    async fn delays(script: Vec<ScriptedEvent>) -> Vec<Duration> {
        let (mut all, mut failed_at) = (Vec::new(), None);
        let mut events = std::pin::pin!(pause_after_errors(stream::iter(script), MAX_PAUSE));
        while let Some(event) = events.next().await {
            all.extend(failed_at.map(|at: Instant| at.elapsed()));
            failed_at = event.is_err().then(Instant::now);
        }
        all
    }

    #[tokio::test]
    async fn a_client_does_not_wait_forever_for_a_silent_server() {
        let mut config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        bound_silence(&mut config);
        // It accepts, and sends nothing.
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        config.cluster_url =
            format!("http://{}", server.local_addr().unwrap()).parse().expect("a URL");
        // The bound of production would take a test too long.
        assert!(config.read_timeout.is_some_and(|it| it <= READ_TIMEOUT));
        config.read_timeout = Some(Duration::from_millis(10));
        let client = kube::Client::try_from(config).unwrap();
        assert!(client.apiserver_version().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn delays_grow_while_lists_fail() {
        // The watcher announces each list, and its second page may fail as well as its first.
        let attempt = || [Ok(Event::Init), Ok(Event::InitApply(1)), broken_watch()];
        let script = (0..FAILURES).flat_map(|_| attempt()).chain([Ok(Event::Init)]).collect();
        let all = delays(script).await;
        assert_eq!(all.len(), FAILURES);
        assert!(all[0] < MAX_PAUSE, "{all:?}");
        assert_eq!(all[FAILURES - 1].as_secs(), MAX_PAUSE.as_secs(), "{all:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn delays_are_short_again_after_a_complete_list_or_a_change() {
        for recovery in [Event::InitDone, Event::Apply(1), Event::Delete(1)] {
            let failures = (0..FAILURES).map(|_| broken_watch());
            let script = failures.chain([Ok(recovery), broken_watch(), Ok(Event::Init)]).collect();
            let all = delays(script).await;
            assert_eq!(all[FAILURES - 1].as_secs(), MAX_PAUSE.as_secs(), "{all:?}");
            assert!(all[FAILURES] < MAX_PAUSE, "{all:?}");
        }
    }

    #[tokio::test]
    async fn a_server_that_refuses_streamed_lists_is_listed_instead() {
        let run = async |script: Vec<ScriptedEvent>| {
            let fallback = || stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
            let events = replace_if_refused(stream::iter(script), fallback);
            events.map(|it| format!("{it:?}")).collect::<Vec<String>>().await
        };
        for code in [400, 422] {
            assert_eq!(run(vec![refused(code)]).await, ["Ok(Init)", "Ok(InitDone)"], "{code}");
        }
        let others = [vec![refused(403)], vec![refused(500)], vec![broken_watch()]];
        for script in others {
            let events = run(script).await;
            assert!(events.len() == 1 && events[0].starts_with("Err"), "{events:?}");
        }
    }
}
