//! Pure: certificates of hosts on the wire, the names of their Secrets, and debug output without keys.

use std::collections::BTreeMap;

use prost::Message as _;

use super::*;
use crate::fixtures;

/// Private key of the tests. No other number of the tests has these digits.
const KEY: [u8; 4] = [201, 202, 203, 204];

fn entry() -> CertificateEntry {
    let key = PrivateKeyBytes::new(KEY.to_vec());
    let material = CertificateMaterial { chain: vec![vec![1, 2, 3], vec![4, 5]], key };
    CertificateEntry { name: name("shop/tls"), material: Some(Arc::new(material)) }
}

/// Returns the entry of a Secret that the controller has no certificate of.
fn entry_without_material() -> CertificateEntry {
    CertificateEntry { material: None, ..entry() }
}

/// Returns a change as a receiver of this release gets it.
fn send(change: RouteChange) -> Result<RouteChange, WireError> {
    let sent = raw::RouteItem::from(item(3, change)).encode_to_vec();
    let received = raw::RouteItem::decode(sent.as_slice()).expect("a message");
    RouteItem::try_from(received).map(|it| it.change)
}

/// Returns the error of a certificate that is refused.
fn refusal(message: raw::Certificate) -> String {
    CertificateEntry::try_from(message).expect_err("must be refused").to_string()
}

#[test]
fn a_certificate_is_read_as_it_was_sent() {
    for entry in [entry(), entry_without_material()] {
        let change = RouteChange::Certificate(entry);
        assert_eq!(send(change.clone()), Ok(change));
    }
    let message = raw::Certificate::from(entry());
    assert_eq!(message.name, "shop/tls");
    assert_eq!(message.chain, [vec![1, 2, 3], vec![4, 5]]);
    assert_eq!(message.key, KEY);
}

#[test]
fn a_chain_without_a_key_is_refused() {
    let whole = raw::Certificate::from(entry());
    let without_key = raw::Certificate { key: Vec::new(), ..whole.clone() };
    assert_eq!(
        refusal(without_key),
        "field certificate.chain is \"2\": must be empty together with the key"
    );
    let without_chain = raw::Certificate { chain: Vec::new(), ..whole };
    assert_eq!(
        refusal(without_chain),
        "field certificate.chain is \"0\": must be empty together with the key"
    );
}

#[test]
fn a_certificate_has_the_name_of_a_secret() {
    for bad in ["", "tls", "shop/", "shop/tls:8443", "Shop/tls"] {
        let message = raw::Certificate { name: bad.into(), ..raw::Certificate::from(entry()) };
        let rule = "must be namespace/name";
        assert_eq!(refusal(message), format!("field certificate.name is {bad:?}: {rule}"));
        let key = Some(raw::route_gone::Key::Certificate(bad.into()));
        let refused = WireError::new("gone.certificate", bad, rule);
        assert_eq!(RouteKey::try_from(raw::RouteGone { key }), Err(refused));
        let edge = raw::Edge { certificates: vec![bad.into()], ..raw::Edge::default() };
        let refused = WireError::new("edge.certificates", bad, rule);
        assert_eq!(EdgeSettings::try_from(edge), Err(refused));
    }
    let certificate = "shop/tls:443".to_owned();
    let domain = raw::Domain { host: "a.example".into(), certificate, ..raw::Domain::default() };
    let error = MappedDomain::try_from(domain).expect_err("a name with a port");
    assert_eq!(
        error.to_string(),
        "field domain.certificate is \"shop/tls:443\": must be namespace/name"
    );
}

/// No Secret has such a name, so a Secret of a user never takes the place of the certificate.
#[test]
fn the_certificate_for_names_inside_the_cluster_has_the_name_of_the_service_with_its_port() {
    let revision = name("shop/web-00001");
    let service = fixtures::service(&name("shop/web"), &revision);
    assert_eq!(service.local_certificate(), None);
    let service = ServiceEntry { serves_local_tls: true, ..service };
    let own = service.local_certificate().expect("https inside the cluster");
    assert_eq!(own.to_string(), "shop/web:443");
    assert!(!is_secret_name(&own.name));
    let change = RouteChange::Certificate(CertificateEntry { name: own.clone(), ..entry() });
    assert_eq!(send(change.clone()), Ok(change));
    let removed = RouteChange::Removed(RouteKey::Certificate(own));
    assert_eq!(send(removed.clone()), Ok(removed));
    let change = RouteChange::Service(service);
    assert_eq!(send(change.clone()), Ok(change));
}

/// The API server bounds the whole name of a Secret, and not its labels as those of a host.
#[test]
fn a_secret_may_have_a_longer_label_than_a_host() {
    let long = ["a".repeat(64), "b".repeat(188)].join(".");
    assert_eq!(long.len(), 253);
    let name = NamespacedName::new("shop", long.as_str());
    let change = RouteChange::Certificate(CertificateEntry { name: name.clone(), ..entry() });
    assert_eq!(send(change.clone()), Ok(change));
    let removed = RouteChange::Removed(RouteKey::Certificate(name));
    assert_eq!(send(removed.clone()), Ok(removed));
    for bad in
        [format!("{long}a"), "-a".into(), "a-".into(), "a..b".into(), ".".into(), "a/b".into()]
    {
        assert!(!is_secret_name(&bad), "{bad}");
    }
}

#[test]
fn the_port_of_https_is_a_port_or_absent() {
    let received = |https_port| {
        EdgeSettings::try_from(raw::Edge { https_port, ..raw::Edge::default() })
            .map(|it| it.https_port.map(NonZeroU16::get))
    };
    assert_eq!(received(0), Ok(None));
    assert_eq!(received(65_535), Ok(Some(65_535)));
    let error = received(65_536).expect_err("no port");
    assert_eq!(error.to_string(), "field edge.https_port is \"65536\": must be a port, or 0");
}

/// Returns true if a text has bytes of the key: as numbers, or as an escaped string.
fn shows_key(text: &str) -> bool {
    let forms = |byte: &u8| [byte.to_string(), format!("\\x{byte:x}")];
    KEY.iter().flat_map(forms).any(|form| text.contains(&form))
}

#[test]
fn no_debug_output_has_bytes_of_a_key() {
    assert!(shows_key(&format!("{KEY:?}")), "the check itself");
    let change = RouteChange::Certificate(entry());
    let raw_item = raw::RouteItem::from(item(3, change.clone()));
    let table = RouteTable {
        certificates: BTreeMap::from([(entry().name, entry())]),
        ..RouteTable::default()
    };
    for text in [
        format!("{:?}", entry()),
        format!("{:#?}", entry()),
        format!("{change:?}"),
        format!("{raw_item:?}"),
        format!("{raw_item:#?}"),
        format!("{table:?}"),
    ] {
        assert!(text.contains("tls"), "the name is shown: {text}");
        assert!(!shows_key(&text), "{text}");
    }
    let key = PrivateKeyBytes::new(KEY.to_vec());
    assert_eq!(format!("{key:?}"), "PrivateKeyBytes(..)");
}

#[test]
fn certificates_come_before_services_and_are_removed() {
    let service = fixtures::service(&name("shop/web"), &name("shop/web-00001"));
    let without = RouteTable {
        services: BTreeMap::from([(service.name.clone(), service.clone())]),
        ..RouteTable::default()
    };
    let certificates = BTreeMap::from([(entry().name, entry())]);
    let table = RouteTable { certificates, ..without.clone() };
    let states: Vec<_> = table.all_states().collect();
    assert_eq!(states, [RouteChange::Certificate(entry()), RouteChange::Service(service)]);
    assert_eq!(RouteTable::default().changes_to(&table), states);
    let key = RouteKey::Certificate(entry().name);
    let removed = RouteChange::Removed(key.clone());
    assert_eq!(table.changes_to(&without), std::slice::from_ref(&removed));
    assert_eq!(send(removed.clone()), Ok(removed));

    let mut view = RouteView::default();
    view.begin_stream();
    for change in states.into_iter().chain([RouteChange::Synced]) {
        view.apply_item(item(1, change));
    }
    assert_eq!(view.table, table);
    view.begin_stream();
    for change in without.all_states() {
        view.apply_item(item(2, change));
    }
    let changed = view.apply_item(item(2, RouteChange::Synced)).expect("a whole table");
    assert!(changed.contains(&key), "a new stream does not name it: {changed:?}");
    assert_eq!(view.table, without);
}
