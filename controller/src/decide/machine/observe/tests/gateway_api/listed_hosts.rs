//! Activators of an earlier release, which get reserved hosts in lists.

use common::{
    outbox::OutboxCursor,
    wire::{RouteChange, RouteKey, RouteTable},
};

use super::*;
use crate::decide::machine::RouteFingerprint;

/// Stream to an activator of an earlier release, and what it has received.
struct EarlierActivator {
    cursor: OutboxCursor<RouteKey, RouteFingerprint>,
    table: RouteTable,
}

impl EarlierActivator {
    /// Opens the stream, and receives the whole table.
    fn new(api_server: &FakeApiServer) -> Self {
        let cursor = api_server.machine.routes().subscribe();
        let mut activator = Self { cursor, table: RouteTable::default() };
        activator.receive(api_server);
        activator
    }

    fn receive(&mut self, api_server: &FakeApiServer) {
        let machine = &api_server.machine;
        let Some(batch) = self.cursor.try_next() else { return };
        let batch = machine.route_messages(batch, &mut self.cursor);
        for (key, change) in machine.with_listed_hosts(&batch).changes {
            self.table.apply_change(change.unwrap_or(RouteChange::Removed(key)));
        }
        assert!(self.table.reserved_hosts.is_empty(), "it reads no items");
    }

    /// Receives the changes. Returns the lists of the service `shop`, of the listener with exactly the host, and of the
    /// listener for all hosts, after a check that a new stream has the same table.
    fn lists(&mut self, api_server: &FakeApiServer) -> [Vec<String>; 3] {
        self.receive(api_server);
        assert_eq!(self.table, Self::new(api_server).table);
        let rules = self.table.services[&name("shop")].gateway_rules.clone().unwrap_or_default();
        let [exact, any] = ["http://www.shop.test", "http://*"].map(|key| {
            let key: GatewayHostKey = key.parse().expect("a key");
            self.table.gateway_hosts[&key].reserved_hosts.clone()
        });
        [rules.reserved_hosts, exact, any]
    }
}

#[test]
fn an_earlier_activator_gets_each_reserved_host_in_the_lists_of_all_that_cover_it() {
    const HOST: &str = "www.shop.test";
    let mut api_server = start();
    let listeners = [listener("exact", Some(HOST)), listener("any", None)];
    apply_gateway(&mut api_server, json!(listeners));
    api_server.apply_service("shop", "hello:v1", 0, Value::Null);
    api_server.claim_domain("shop.test", NAMESPACE);
    api_server.map_service_domain("all", "shop", json!({"rouse.dev/host": "*.shop.test"}));
    let mut activator = EarlierActivator::new(&api_server);
    let none: [&str; 0] = [];
    assert_eq!(activator.lists(&api_server), [&none[..], &[], &["*.shop.test"]]);
    api_server.claim_domain(HOST, NAMESPACE);
    api_server.map_service_domain(HOST, "missing", json!({}));
    let all = ["*.shop.test", HOST];
    assert_eq!(activator.lists(&api_server), [&[HOST][..], &[HOST], &all]);
    assert!(api_server.table().gateway_hosts.values().all(|it| it.reserved_hosts.is_empty()));
    // A wildcard that comes later lists what is reserved already.
    api_server.delete_as_user(ResourceKind::DomainMapping, "all");
    assert_eq!(activator.lists(&api_server), [&none[..], &[HOST], &[HOST]]);
    api_server.map_service_domain("all", "shop", json!({"rouse.dev/host": "*.shop.test"}));
    assert_eq!(activator.lists(&api_server), [&[HOST][..], &[HOST], &all]);
    // Without the claim, the mapping has no host.
    api_server.claim_domain(HOST, "other");
    assert_eq!(activator.lists(&api_server), [&none[..], &[], &["*.shop.test"]]);
}
