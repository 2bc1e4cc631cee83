use std::{
    collections::BTreeMap,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex},
};

use futures::Stream;
use tokio::sync::mpsc;
use tonic::{Request, Response, transport::Server};

use super::*;
use crate::{
    component::Component,
    fixtures, log,
    wire::{
        ActivatorEntry, ClientComponent, GlobalSettings, LogLevel, LogLevels, RouteChange,
        RouteKey, RouteView,
        raw::routes_server::{Routes, RoutesServer},
    },
};

mod attempts;
mod replicas;
mod route_streams;
mod slots;

struct FakeRouteServer {
    outbox: Outbox<RouteKey, RouteChange>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl Routes for FakeRouteServer {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(route_stream(self.outbox.subscribe(), self.stop.clone(), Some))))
    }
}

fn socket(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("rouse-link-{name}-{}.sock", std::process::id()))
}

fn set_activator(outbox: &Outbox<RouteKey, RouteChange>, name: &str) {
    let addresses = vec!["10.0.0.1".parse().expect("an address")];
    let entry = fixtures::activator(name, addresses);
    outbox.set(RouteKey::Activator(name.into()), RouteChange::Activator(entry));
}

fn serve_fake_routes(endpoint: &str, outbox: &Outbox<RouteKey, RouteChange>) -> CancellationToken {
    let stop = CancellationToken::new();
    let fake = FakeRouteServer { outbox: outbox.clone(), stop: stop.clone() };
    let router = Server::builder().add_service(RoutesServer::new(fake));
    let (endpoint, token) = (endpoint.to_owned(), stop.clone());
    tokio::spawn(async move { serve(&endpoint, router, token).await });
    stop
}

/// Server that dies and comes back with another table.
#[tokio::test]
async fn subjects_that_a_new_stream_omits_are_passed_on_as_changes() {
    let path = socket("changes");
    let endpoint = format!("unix:{}", path.display());
    let first = Outbox::new();
    set_activator(&first, "a");
    set_activator(&first, "b");
    let (send, mut batches) = mpsc::channel(16);
    let subscriber =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    let shutdown = CancellationToken::new();
    let link = ComponentLink::new(endpoint.clone(), subscriber, shutdown.clone());
    let watcher = tokio::spawn(async move {
        let named = |view: &RouteView, changed: &BTreeSet<RouteKey>| {
            let existing: BTreeSet<_> = view.table.all_states().filter_map(|it| it.key()).collect();
            let state = |key: &RouteKey| (key.clone(), existing.contains(key));
            changed.iter().map(state).collect::<Vec<_>>()
        };
        link.watch_routes(|view, changed| send.try_send(named(view, changed)).expect("room")).await;
    });
    let is = |name: &str, existing| (RouteKey::Activator(name.into()), existing);

    let stop = serve_fake_routes(&endpoint, &first);
    assert_eq!(batches.recv().await, Some(vec![is("a", true), is("b", true)]));
    set_activator(&first, "c");
    assert_eq!(batches.recv().await, Some(vec![is("c", true)]));
    first.remove(&RouteKey::Activator("a".into()));
    assert_eq!(batches.recv().await, Some(vec![is("a", false)]));

    let second = Outbox::new();
    set_activator(&second, "c");
    stop.cancel();
    drop(first);
    let stop = serve_fake_routes(&endpoint, &second);
    assert_eq!(batches.recv().await, Some(vec![is("b", false)]), "the other one is as before");

    shutdown.cancel();
    watcher.await.expect("no panic");
    stop.cancel();
    let _ = std::fs::remove_file(path);
}

#[tokio::test]
async fn a_table_follows_over_a_broken_stream() {
    let path = socket("follow");
    let endpoint = format!("unix:{}", path.display());
    let first = Outbox::new();
    set_activator(&first, "a");
    set_activator(&first, "b");

    let (send, mut tables) = mpsc::channel(16);
    let received = Arc::new(Mutex::new(BTreeMap::new()));
    let subscriber =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    let shutdown = CancellationToken::new();
    let link = Arc::new(ComponentLink::new(endpoint.clone(), subscriber, shutdown.clone()));
    let watcher = tokio::spawn({
        let (link, received) = (Arc::clone(&link), Arc::clone(&received));
        async move {
            link.watch_routes(|view, _| {
                *received.lock().expect("no panic") = view.table.activators.clone();
                let _ = send.try_send(view.table.activators.keys().cloned().collect::<Vec<_>>());
            })
            .await;
        }
    });

    // The client retries until the server listens.
    let stop = serve_fake_routes(&endpoint, &first);
    assert_eq!(tables.recv().await, Some(vec!["a".to_owned(), "b".to_owned()]));
    set_activator(&first, "c");
    assert_eq!(tables.recv().await.map(|all| all.len()), Some(3));
    assert!(link.is_connected());

    let second = Outbox::new();
    set_activator(&second, "d");
    stop.cancel();
    drop(first);
    let stop = serve_fake_routes(&endpoint, &second);
    while tables.recv().await != Some(vec!["d".to_owned()]) {}
    assert_eq!(received.lock().expect("no panic").len(), 1);

    shutdown.cancel();
    watcher.await.expect("no panic");
    stop.cancel();
    let _ = std::fs::remove_file(path);
}

/// The rules of all routes of a host are one item, and users decide how many there are.
#[tokio::test]
async fn a_large_item_does_not_end_the_stream() {
    let path = socket("large");
    let endpoint = format!("unix:{}", path.display());
    let outbox = Outbox::new();
    let large = ActivatorEntry { node: "n".repeat(5 << 20), ..fixtures::activator("a", vec![]) };
    outbox.set(RouteKey::Activator("a".into()), RouteChange::Activator(large));
    let (send, mut batches) = mpsc::channel(16);
    let role = ClientComponent::Activator;
    let subscriber = ComponentReplica { role, name: "a".into(), node: String::new() };
    let shutdown = CancellationToken::new();
    let link = ComponentLink::new(endpoint.clone(), subscriber, shutdown.clone());
    let watcher = tokio::spawn(async move {
        link.watch_batches(|batch| send.try_send(batch.changes.len()).expect("room")).await;
    });
    let stop = serve_fake_routes(&endpoint, &outbox);
    assert_eq!(batches.recv().await, Some(1));
    set_activator(&outbox, "b");
    assert_eq!(batches.recv().await, Some(1));

    shutdown.cancel();
    watcher.await.expect("no panic");
    stop.cancel();
    let _ = std::fs::remove_file(path);
}

#[tokio::test]
async fn a_component_receives_its_log_level() {
    let path = socket("levels");
    let endpoint = format!("unix:{}", path.display());
    let outbox = Outbox::new();
    let say = |autoscaler| {
        let log_levels = LogLevels { autoscaler, agent: LogLevel::Warn, ..LogLevels::default() };
        let settings = GlobalSettings { log_levels, ..GlobalSettings::default() };
        outbox.set(RouteKey::Settings, RouteChange::Settings(settings));
    };
    say(LogLevel::Debug);
    let (send, mut heard) = mpsc::channel(16);
    log::set_listener(move |levels| {
        let mine = levels.iter().find(|(it, _)| *it == Component::Autoscaler);
        mine.into_iter().for_each(|(_, level)| send.try_send(*level).expect("room"));
    });
    // No other test of this process logs as an autoscaler.
    let role = ClientComponent::Autoscaler;
    let subscriber = ComponentReplica { role, name: "a".into(), node: String::new() };
    let shutdown = CancellationToken::new();
    let link = ComponentLink::new(endpoint.clone(), subscriber, shutdown.clone());
    let watcher = tokio::spawn(async move { link.watch_batches(drop).await });
    let stop = serve_fake_routes(&endpoint, &outbox);
    assert_eq!(heard.recv().await, Some(LogLevel::Debug));
    say(LogLevel::Error);
    assert_eq!(heard.recv().await, Some(LogLevel::Error));
    outbox.remove(&RouteKey::Settings);
    assert_eq!(heard.recv().await, Some(LogLevel::Info), "as usual");

    shutdown.cancel();
    watcher.await.expect("no panic");
    stop.cancel();
    let _ = std::fs::remove_file(path);
}
