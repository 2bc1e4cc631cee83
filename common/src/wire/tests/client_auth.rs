//! Pure: client certificates and policies of TLS on the wire, and how an earlier release reads them.

use std::collections::BTreeMap;

use super::*;

fn domain(host: &str, client_auth: Option<ClientAuth>) -> MappedDomain {
    MappedDomain { client_auth, ..fixtures::mapped_domain(host) }
}

fn client_auth(ca: Option<&str>, is_optional: bool) -> Option<ClientAuth> {
    Some(ClientAuth { ca: ca.map(name), is_optional })
}

fn rules(mapped_domains: Vec<MappedDomain>) -> GatewayRules {
    GatewayRules { mapped_domains, ..GatewayRules::default() }
}

fn entry() -> ClientCaEntry {
    let material = Some(Arc::new(ClientCaMaterial(vec![vec![1, 2], vec![3]])));
    ClientCaEntry { name: name("shop/clients"), material }
}

/// An earlier release would serve such a host to all clients.
#[test]
fn a_host_with_client_certificates_is_not_where_an_earlier_release_looks() {
    let open = domain("open.example", None);
    let guarded = [
        domain("a.example", client_auth(Some("shop/clients"), false)),
        domain("b.example", client_auth(Some("shop/clients"), true)),
        domain("c.example", client_auth(None, false)),
    ];
    let mut all = vec![open.clone()];
    all.extend(guarded);
    let message = raw::Ingress::from(rules(all.clone()));
    let hosts = |domains: &[raw::Domain]| -> Vec<String> {
        domains.iter().map(|it| it.host.clone()).collect()
    };
    assert_eq!(hosts(&message.domains), ["open.example"]);
    assert_eq!(hosts(&message.guarded_domains), ["a.example", "b.example", "c.example"]);
    assert_eq!(GatewayRules::try_from(message), Ok(rules(all)));
}

#[test]
fn a_guarded_host_without_its_rule_is_refused() {
    let unguarded = raw::Domain { host: "a.example".into(), ..raw::Domain::default() };
    let message = raw::Ingress { guarded_domains: vec![unguarded], ..raw::Ingress::default() };
    let error = GatewayRules::try_from(message).expect_err("it would be served to all clients");
    assert_eq!(error.to_string(), "field ingress.guarded_domains is \"\": must have client_auth");
}

#[test]
fn authorities_are_read_as_they_were_sent_and_come_before_services() {
    for entry in [entry(), ClientCaEntry { material: None, ..entry() }] {
        let item = item(3, RouteChange::ClientCa(entry));
        assert_eq!(RouteItem::try_from(raw::RouteItem::from(item.clone())), Ok(item));
    }
    let service = fixtures::service(&name("shop/web"), &name("shop/web-00001"));
    let services = BTreeMap::from([(service.name.clone(), service.clone())]);
    let without = RouteTable { services, ..RouteTable::default() };
    let client_cas = BTreeMap::from([(entry().name, entry())]);
    let table = RouteTable { client_cas, ..without.clone() };
    let states: Vec<_> = table.all_states().collect();
    assert_eq!(states, [RouteChange::ClientCa(entry()), RouteChange::Service(service)]);
    assert_eq!(without.changes_to(&table), [RouteChange::ClientCa(entry())]);
    let removal = RouteChange::Removed(RouteKey::ClientCa(entry().name));
    assert_eq!(table.changes_to(&without), std::slice::from_ref(&removal));
    let sent = item(4, removal.clone());
    assert_eq!(RouteItem::try_from(raw::RouteItem::from(sent.clone())), Ok(sent));
    let mut received = table;
    received.apply_change(removal);
    assert_eq!(received, without);
    assert_eq!(format!("{:?}", ClientCaMaterial(vec![vec![77]])), "ClientCaMaterial(1)");
}

#[test]
fn policies_that_this_component_does_not_support_are_refused() {
    let refusal = |message: raw::Edge| {
        EdgeSettings::try_from(message).expect_err("must be refused").to_string()
    };
    let hsts = raw::Edge { hsts: "preload".into(), ..raw::Edge::default() };
    assert_eq!(refusal(hsts), "field edge.hsts is \"preload\": must be a policy of RFC 6797");
    let tls_ciphers = vec!["TLS_NEW".to_owned()];
    let ciphers = raw::Edge { tls_ciphers, ..raw::Edge::default() };
    assert_eq!(
        refusal(ciphers),
        "field edge.tls_ciphers is \"TLS_NEW\": must be a supported cipher"
    );
    let tls_ciphers = vec![TlsCipher::EcdheRsaAes128GcmSha256.name().to_owned()];
    let none = raw::Edge { tls13_only: true, tls_ciphers, ..raw::Edge::default() };
    assert_eq!(
        refusal(none),
        "field edge.tls_ciphers is \"1\": must have a cipher of the lowest version or a later one"
    );
}

/// An earlier release would end TLS of such a host, and read HTTP.
#[test]
fn a_host_that_passes_tls_through_is_not_where_an_earlier_release_looks() {
    let passed =
        MappedDomain { protocol: DomainProtocol::TlsPassthrough, ..domain("db.example", None) };
    let all = vec![domain("a.example", None), passed];
    let message = raw::Ingress::from(rules(all.clone()));
    let hosts: Vec<&str> = message.domains.iter().map(|it| it.host.as_str()).collect();
    assert_eq!((hosts, message.guarded_domains.len()), (vec!["a.example"], 0));
    assert_eq!(message.passthrough_domains.len(), 1);
    assert_eq!(GatewayRules::try_from(message), Ok(rules(all)));
    let path_rule = Some(PathRule::default());
    let below = MappedDomain {
        protocol: DomainProtocol::TlsPassthrough,
        path_rule,
        ..domain("*.db.example", None)
    };
    let message = raw::Ingress::from(rules(vec![below.clone()]));
    assert_eq!((message.ruled_domains.len(), message.passthrough_domains.len()), (0, 1));
    assert_eq!(GatewayRules::try_from(message), Ok(rules(vec![below])));
}

/// An earlier release would read HTTP within TLS of such a host.
#[test]
fn a_host_of_raw_tcp_is_not_where_an_earlier_release_looks() {
    let protocol = DomainProtocol::TcpOverTls;
    let guarded = MappedDomain { protocol, ..domain("db.example", client_auth(None, false)) };
    let path_rule = Some(PathRule::default());
    let below = MappedDomain { protocol, path_rule, ..domain("*.db.example", None) };
    let all = vec![domain("a.example", None), guarded, below];
    let message = raw::Ingress::from(rules(all.clone()));
    let earlier = [&message.guarded_domains, &message.ruled_domains, &message.passthrough_domains];
    assert_eq!((message.domains.len(), earlier.map(Vec::len)), (1, [0; 3]));
    assert_eq!(message.tcp_domains.len(), 2);
    assert_eq!(GatewayRules::try_from(message), Ok(rules(all)));
    let path_prefix = "/a".to_owned();
    let ruled = raw::Domain { host: "db.example".into(), path_prefix, ..raw::Domain::default() };
    let message = raw::Ingress { tcp_domains: vec![ruled], ..raw::Ingress::default() };
    GatewayRules::try_from(message).expect_err("a handshake shows no path");
}
