//! Shell: an activator on one thread before a pod of the user's choice, for measurements without the other components.
//!
//! `cargo run --release -p activator --example loopback -- 20000 127.0.0.1:9000 [AFTER_MS]` serves port 20000
//! with the pod at 127.0.0.1:9000. The pod becomes ready AFTER_MS milliseconds after the start (default 0).

use std::{
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use activator::{ActivatorConfig, ActivatorInstance};
use anyhow::Context as _;
use common::{
    fixtures,
    link::RouteBatch,
    wire::{ConnectionPath, NamespacedName, RouteChange, RouteTable, RoutingPhase, ServiceEntry},
};
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().with_context(|| format!("argument {what} is missing"));
    let port: NonZeroU16 = next("PORT")?.parse().context("PORT must be 1 to 65535")?;
    let pod: SocketAddr = next("POD")?.parse().context("POD must be address:port")?;
    anyhow::ensure!(pod.port() != 0, "POD needs a port");
    let after = next("AFTER_MS").map_or(Ok(0), |text| text.parse())?;
    let mut config = ActivatorConfig::defaults();
    config.listen = vec![[127, 0, 0, 1].into()];
    // Bounds that no measurement reaches: the result must not depend on them.
    config.max_waiting = 100_000;
    config.max_waiting_bytes = 1 << 30;
    let activator =
        ActivatorInstance::new(&config, &mut Registry::default(), &CancellationToken::new());
    let apply = |states: Vec<RouteChange>| {
        let states = states.into_iter().filter_map(|state| Some((state.key()?, state)));
        let batch = RouteBatch { changes: states.collect(), ..RouteBatch::default() };
        activator.forwarder.routes.apply(batch);
    };
    apply(table(port).all_states().collect());
    activator.ports.apply_routes();
    let failures = activator.ports.not_ready_reasons();
    anyhow::ensure!(failures.is_empty(), "{}", failures.join(", "));
    // Without a listener every measurement would be one of refused connections.
    let connected = TcpStream::connect((Ipv4Addr::LOCALHOST, port.get())).await;
    connected.with_context(|| format!("the activator does not listen on port {port}"))?;
    tokio::time::sleep(Duration::from_millis(after)).await;
    let ready = fixtures::pod_at("pod", &revision(), RoutingPhase::Ready, pod);
    apply(vec![RouteChange::Pod(ready.into())]);
    std::future::pending::<()>().await;
    Ok(())
}

fn revision() -> NamespacedName {
    NamespacedName::new("default", "hello-1")
}

fn table(port: NonZeroU16) -> RouteTable {
    let mut table = RouteTable::default();
    let service = ServiceEntry {
        port,
        activator_port: port,
        connection_path: ConnectionPath::Activator,
        ..fixtures::service(&NamespacedName::new("default", "hello"), &revision())
    };
    table.services.insert(service.name.clone(), service);
    table.revisions.insert(revision(), fixtures::revision(&revision(), "hello"));
    table
}
