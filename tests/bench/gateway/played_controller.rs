//! Shell: the controller and the autoscaler of a measured activator, which the bench plays: a RouteTable, and receivers
//! of the activator's reports.

use std::{
    net::SocketAddr,
    num::NonZeroU16,
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use common::{
    fixtures, link,
    outbox::Outbox,
    wire::{
        AppProtocol, ConnectionPath, NamespacedName, PodReportItem, RouteChange, RouteKey,
        RoutingPhase, ServiceEntry, UsageItem,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            routes_server::{Routes, RoutesServer},
            usage_server::{Usage, UsageServer},
        },
    },
};
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, Streaming, transport::Server};

use crate::{
    cases::{ASLEEP_HOST, AWAKE_HOST, GRPC_HOST, GatewayPort},
    crowd::within,
    proxy_configs::POD_ADDRESS,
};

/// Timeout of the activator's report that a table is in force.
const IN_FORCE_TIMEOUT: Duration = Duration::from_secs(60);

/// Controller and autoscaler of one activator. Dropping it ends their servers.
#[derive(Debug)]
pub(crate) struct PlayedController {
    routes: Outbox<RouteKey, RouteChange>,
    stream: Arc<RouteStreamControl>,
    /// Newest version that the activator has in force.
    applied: watch::Receiver<u64>,
    /// Addresses for `--controller` and `--autoscaler`.
    pub(crate) endpoints: [String; 2],
    _end: DropGuard,
}

/// Control over the stream of routes that is open.
#[derive(Debug)]
struct RouteStreamControl {
    /// Cancelled to end the open stream. The next stream has a token of its own.
    stop: Mutex<CancellationToken>,
    /// Ends all streams.
    end: CancellationToken,
    /// Moment at which the newest stream sent the end of its first batch, which is the whole table.
    table_sent: watch::Sender<Option<Instant>>,
}

struct PlayedRoutes {
    routes: Outbox<RouteKey, RouteChange>,
    stream: Arc<RouteStreamControl>,
}

struct PlayedPods {
    applied: watch::Sender<u64>,
    end: CancellationToken,
}

struct PlayedUsage {
    end: CancellationToken,
}

impl PlayedController {
    /// Starts both servers at sockets in `folder`. It must be called in a runtime.
    pub(crate) fn start(folder: &Path) -> Self {
        let endpoints =
            ["controller", "autoscaler"].map(|it| format!("unix:{}/{it}.sock", folder.display()));
        let end = CancellationToken::new();
        let stream = Arc::new(RouteStreamControl {
            stop: Mutex::new(end.child_token()),
            end: end.clone(),
            table_sent: watch::Sender::new(None),
        });
        let routes = Outbox::new();
        let (applied_tx, applied) = watch::channel(0);
        let controller = Server::builder()
            .add_service(RoutesServer::new(PlayedRoutes {
                routes: routes.clone(),
                stream: Arc::clone(&stream),
            }))
            .add_service(PodsServer::new(PlayedPods { applied: applied_tx, end: end.clone() }));
        let autoscaler =
            Server::builder().add_service(UsageServer::new(PlayedUsage { end: end.clone() }));
        for (endpoint, router) in endpoints.iter().cloned().zip([controller, autoscaler]) {
            let end = end.clone();
            tokio::spawn(async move { link::serve(&endpoint, router, end).await });
        }
        Self { routes, stream, applied, endpoints, _end: end.drop_guard() }
    }

    /// Adds or replaces subjects of the RouteTable.
    pub(crate) fn set(&self, changes: impl IntoIterator<Item = RouteChange>) {
        for change in changes {
            if let Some(key) = change.key() {
                self.routes.set(key, change);
            }
        }
    }

    /// Waits until the activator reports that all changes so far are in force.
    pub(crate) async fn wait_in_force(&self) -> Result<()> {
        let version = self.routes.version();
        let mut applied = self.applied.clone();
        let reported = within(IN_FORCE_TIMEOUT, applied.wait_for(|it| *it >= version)).await;
        let reported = reported.context("the activator does not apply its routes")?;
        reported.context("the controller has ended")?;
        Ok(())
    }

    /// Ends the stream of routes, and changes subjects before the next one begins with the whole table. Returns a
    /// receiver of the moment at which the next stream has sent all of it.
    pub(crate) fn change_by_new_stream(
        &self,
        changes: impl IntoIterator<Item = RouteChange>,
    ) -> watch::Receiver<Option<Instant>> {
        let sent = self.stream.table_sent.subscribe();
        self.stream.table_sent.send_replace(None);
        // A stream looks for its end before it looks for changes, so the former one sends none of these.
        self.stream.begin_next_stream();
        self.set(changes);
        sent
    }
}

impl RouteStreamControl {
    fn begin_next_stream(&self) {
        let next = self.end.child_token();
        let mut stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *stop, next).cancel();
    }

    fn current_stop(&self) -> CancellationToken {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[tonic::async_trait]
impl Routes for PlayedRoutes {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _subscriber: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let control = Arc::clone(&self.stream);
        let items = link::route_stream(self.routes.subscribe(), control.current_stop(), Some);
        let mut is_first_batch = true;
        let items = items.inspect(move |item| {
            if is_first_batch && is_end_of_batch(item) {
                is_first_batch = false;
                control.table_sent.send_replace(Some(Instant::now()));
            }
        });
        Ok(Response::new(Box::pin(items)))
    }
}

fn is_end_of_batch(item: &Result<raw::RouteItem, Status>) -> bool {
    use raw::route_item::What;
    matches!(item, Ok(raw::RouteItem { what: Some(What::Synced(_)), .. }))
}

#[tonic::async_trait]
impl Pods for PlayedPods {
    async fn report(
        &self,
        items: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let each = |item: PodReportItem| {
            if let PodReportItem::Applied(version) = item {
                self.applied.send_replace(version);
            }
        };
        link::receive_items(items.into_inner(), &self.end, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

#[tonic::async_trait]
impl Usage for PlayedUsage {
    async fn report(
        &self,
        items: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        // The bench itself decides when pods become ready.
        let each = |_item: UsageItem| {};
        link::receive_items(items.into_inner(), &self.end, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

/// Services of the cases: two with a ready pod, and one without pods.
pub(crate) fn bench_routes() -> Vec<RouteChange> {
    let pod = |name, port: GatewayPort| ready_pod(name, &revision_name(name), port.at(POD_ADDRESS));
    let mut changes = service("awake", 19_001, AWAKE_HOST, AppProtocol::Http1);
    changes.extend(service("grpc", 19_002, GRPC_HOST, AppProtocol::H2c));
    changes.extend(service("asleep", 19_003, ASLEEP_HOST, AppProtocol::Http1));
    changes.extend([pod("awake", GatewayPort::H1), pod("grpc", GatewayPort::Grpc)]);
    changes
}

/// Name of the Revision of a service of [`bench_routes`].
pub(crate) fn revision_name(service: &str) -> NamespacedName {
    NamespacedName::new("bench", format!("{service}-00001"))
}

/// Ready pod of a Revision at an address.
pub(crate) fn ready_pod(uid: &str, revision: &NamespacedName, address: SocketAddr) -> RouteChange {
    RouteChange::Pod(fixtures::pod_at(uid, revision, RoutingPhase::Ready, address).into())
}

/// Pod of a Revision that starts, and will be ready at an address.
pub(crate) fn starting_pod(
    uid: &str,
    revision: &NamespacedName,
    address: SocketAddr,
) -> RouteChange {
    RouteChange::Pod(fixtures::pod_at(uid, revision, RoutingPhase::Starting, address).into())
}

/// Changes that add a service with one host, and its Revision.
fn service(name: &str, port: u16, host: &str, protocol: AppProtocol) -> Vec<RouteChange> {
    let revision = revision_name(name);
    let service = ServiceEntry {
        activator_port: NonZeroU16::new(port).expect("the ports of the services are not 0"),
        connection_path: ConnectionPath::Activator,
        hosts: vec![host.to_owned()],
        ..fixtures::service(&NamespacedName::new("bench", name), &revision)
    };
    let mut revision = fixtures::revision(&revision, name);
    revision.protocol = protocol;
    vec![RouteChange::Revision(revision), RouteChange::Service(service)]
}
