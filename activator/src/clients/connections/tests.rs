#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::IpAddr, sync::Barrier, thread};

use prometheus_client::registry::Registry;

use super::*;
use crate::{config::ActivatorConfig, metrics::ActivatorMetrics};

fn create_table(max_connections: usize) -> Arc<ClientConnections> {
    let refusals = ActivatorMetrics::register(&mut Registry::default()).refusals;
    let budget = ClientBudget { max_connections, ..ActivatorConfig::defaults().budget(1024) };
    Arc::new(ClientConnections::new(budget, refusals))
}

/// Threads accept connections at the same moment. Of those that stay there are never more than the bound.
#[test]
fn concurrent_accepts_keep_the_bound_of_connections() {
    const THREADS: usize = 4;
    for _ in 0..500 {
        let (table, start) = (create_table(2), Barrier::new(THREADS));
        let register = || {
            start.wait();
            table.register()
        };
        let registered: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(register)).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let staying = registered.iter().flatten().filter(|it| !it.cut_off.is_cancelled()).count();
        assert!(staying <= 2, "{staying}");
    }
}

#[test]
fn a_full_table_takes_a_connection_in_place_of_an_idle_one_only() {
    let table = create_table(1);
    let first = table.register().unwrap();
    let second = table.register().unwrap();
    assert!(first.cut_off.is_cancelled());
    let _request = second.start_request();
    assert!(table.register().is_none());
    assert!(!second.cut_off.is_cancelled());
}

#[test]
fn a_connection_counts_with_one_client_until_it_ends() {
    let table = create_table(4);
    let connection = table.register().unwrap();
    let clients = ["192.0.2.1", "192.0.2.2"].map(|it| it.parse::<IpAddr>().unwrap());
    assert!(clients.into_iter().all(|client| connection.try_assign_client(client)));
    let counted = || -> Vec<usize> {
        let table = table.lock_table();
        let usages = table.clients.values().filter_map(Weak::upgrade);
        usages.map(|it| it.connections.load(Ordering::Relaxed)).collect()
    };
    assert_eq!(counted(), [1]);
    drop(connection);
    assert_eq!((counted(), table.lock_table().clients.len()), (vec![], 0));
}

#[test]
fn open_connections_are_counted_by_kind() {
    let table = create_table(9);
    let connections: Vec<_> = (0..5).map(|_| table.register().unwrap()).collect();
    connections[1].set_protocol(ConnectionProtocol::Http1 { is_tls: false });
    connections[2].set_protocol(ConnectionProtocol::Http2 { is_tls: true });
    connections[3].set_protocol(ConnectionProtocol::Http2 { is_tls: false });
    connections[4].set_protocol(ConnectionProtocol::Tcp);
    let counts = ConnectionCounts { opening: 1, http1: 1, http2: 2, tcp: 1, tls: 1 };
    assert_eq!(table.count_by_kind(), counts);
    drop(connections);
    assert_eq!(table.count_by_kind(), ConnectionCounts::default());
}
