use super::*;
use crate::request_log::LogTemplate;

fn name(text: &str) -> NamespacedName {
    text.parse().expect("a valid name")
}

fn activator(which: &str) -> ActivatorEntry {
    ActivatorEntry {
        name: which.into(),
        node: "n1".into(),
        zone: String::new(),
        addresses: Vec::new(),
    }
}

fn item(version: u64, change: RouteChange) -> RouteItem {
    RouteItem { version, change }
}

#[test]
fn names_refuse_what_kubernetes_refuses() {
    assert_eq!(name("default/hello.v1"), NamespacedName::new("default", "hello.v1"));
    for bad in ["", "hello", "default/", "/hello", "Default/hello", "a/b/c", "default/-x"] {
        assert!(bad.parse::<NamespacedName>().is_err(), "{bad:?} must be refused");
    }
}

#[test]
fn a_new_stream_removes_what_it_does_not_name() {
    let mut view = RouteView::default();
    view.restart();
    assert_eq!(view.absorb(item(1, RouteChange::Activator(activator("a")))), None);
    assert_eq!(view.absorb(item(2, RouteChange::Activator(activator("b")))), None);
    assert_eq!(view.absorb(item(2, RouteChange::Synced)).map(|keys| keys.len()), Some(2));

    view.restart();
    assert_eq!(view.absorb(item(7, RouteChange::Activator(activator("b")))), None);
    assert!(
        view.table.activators.contains_key("a"),
        "the old table holds until the new one is whole"
    );
    let gone = RouteKey::Activator("a".into());
    assert!(view.absorb(item(7, RouteChange::Synced)).expect("a whole table").contains(&gone));
    assert_eq!(view.table.activators.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(view.version, 7);
}

#[test]
fn changes_lead_from_one_table_to_the_other() {
    let mut have = RouteTable::default();
    have.activators.insert("a".into(), activator("a"));
    have.activators.insert("b".into(), activator("b"));
    let mut want = have.clone();
    want.activators.remove("a");
    want.activators.insert("c".into(), activator("c"));

    let mut view = RouteView { table: have.clone(), ..RouteView::default() };
    for change in have.changes(&want) {
        view.absorb(item(1, change));
    }
    assert_eq!(view.table, want);
    assert_eq!(want.changes(&want), []);
}

#[test]
fn a_ready_pod_needs_an_address() {
    let raw = raw::Pod {
        uid: "u".into(),
        revision: "default/hello-00001".into(),
        phase: raw::PodPhase::Ready.into(),
        port: 8080,
        probe: Some(raw::Probe {
            how: Some(raw::probe::How::Listen(raw::Empty {})),
            ..raw::Probe::default()
        }),
        ..raw::Pod::default()
    };
    let refused = PodEntry::try_from(raw.clone()).expect_err("no address");
    assert_eq!(refused.to_string(), "field pod.address is \"\": a ready pod has an address");
    let also = std::vec![7; 16];
    let addressed = raw::Pod { address: std::vec![10, 0, 0, 7], also, confirmed: true, ..raw };
    let pod = PodEntry::try_from(addressed.clone()).expect("an address");
    let back = raw::Pod::from(pod);
    assert_eq!((&back.address, &back.also), (&addressed.address, &addressed.also));
    assert!(back.confirmed);
}

/// A service from a sender of the previous release, which omits the newer fields, is accepted.
#[test]
fn a_neighbour_that_knows_no_ingress_is_understood() {
    let old = raw::Service {
        name: "default/hello".into(),
        port: 80,
        activator_port: 20_000,
        path: raw::Path::Direct.into(),
        hosts: std::vec!["hello.default.example.com".into()],
        ..raw::Service::default()
    };
    assert_eq!(ServiceEntry::try_from(old).expect("valid").ingress, None);
}

#[test]
fn what_a_gateway_does_for_a_service_comes_back_as_it_was_sent() {
    let tag = |tag: &str| RouteTag {
        name: tag.into(),
        service: NamespacedName::new("default", "blue-hello"),
    };
    for tags in
        [None, Some(TagRouting::Choice(std::vec![tag("blue")])), Some(TagRouting::Tag("b".into()))]
    {
        let domain = |rewrite| MappedDomain { host: "a.example".into(), rewrite, redirects: true };
        let domains = std::vec![domain(None), domain(Some("hello.default.svc".into()))];
        let ingress = GatewayRules { redirects: true, domains, tags };
        assert_eq!(GatewayRules::try_from(raw::Ingress::from(ingress.clone())), Ok(ingress));
    }
    let nameless = raw::Domain::default();
    let refused = MappedDomain::try_from(nameless).expect_err("no host");
    assert_eq!(refused.to_string(), "field domain.host is \"\": must not be empty");
}

#[test]
fn the_integral_counts_open_and_closed_requests() {
    let mut totals = RequestTotals::default();
    totals.start(10);
    assert_eq!(totals.integral(15), 5);
    totals.start(20);
    assert_eq!(totals.integral(30), 30);
    totals.finish(30);
    totals.finish(40);
    assert_eq!((totals.in_flight(), totals.integral(50)), (0, 20 + 20));
}

#[test]
fn settings_travel_once_for_all_services_and_only_where_they_are_not_usual() {
    let template = LogTemplate::parse("{{.Request.Method}}").expect("a good template");
    let levels =
        LogLevels { agent: LogLevel::Debug, autoscaler: LogLevel::Error, ..LogLevels::default() };
    let edge = EdgeSettings {
        trusted_proxies: vec!["10.0.0.0/8".parse().expect("a network")],
        proxy_protocol: true,
        upgrades: vec!["foo/2".into()],
        underscores: true,
    };
    let settings = GlobalSettings {
        request_log: Some(RequestLogSettings { template, probes: true }),
        levels,
        edge,
    };
    let usual = RouteTable::default();
    let logged = RouteTable { settings: settings.clone(), ..RouteTable::default() };
    let said = RouteChange::Settings(settings);
    assert_eq!(logged.states().collect::<Vec<_>>(), std::slice::from_ref(&said));
    assert_eq!(usual.states().count(), 0);
    assert_eq!(usual.changes(&logged), std::slice::from_ref(&said));
    assert_eq!(logged.changes(&usual), [RouteChange::Gone(RouteKey::Settings)]);
    for change in [said, RouteChange::Gone(RouteKey::Settings)] {
        let item = item(3, change);
        assert_eq!(RouteItem::try_from(raw::RouteItem::from(item.clone())), Ok(item));
    }

    let mut view = RouteView::default();
    view.restart();
    for change in logged.states().chain([RouteChange::Synced]) {
        view.absorb(item(1, change));
    }
    assert_eq!(view.table, logged);
    view.restart();
    let gone = view.absorb(item(1, RouteChange::Synced)).expect("a whole table");
    assert!(gone.contains(&RouteKey::Settings));
    assert_eq!(view.table, usual, "a table that says nothing of them means the usual ones");
}

#[test]
fn a_template_that_this_part_cannot_carry_out_is_refused() {
    let log = raw::RequestLog { template: "{{if}}".into(), probes: false };
    let settings = raw::Settings { request_log: Some(log), ..raw::Settings::default() };
    let refused = GlobalSettings::try_from(settings).expect_err("no such function");
    assert!(refused.to_string().starts_with("field request_log.template is "), "{refused}");
}

#[test]
fn earlier_releases_read_a_heartbeat_as_what_they_know() {
    let alive = AutoscalerHeartbeat {
        since_ms: 7,
        heard_ms: 61_000,
        is_full: true,
        reporters: 4,
        counts: Some("autoscaler-1".into()),
    };
    for alive in [alive.clone(), AutoscalerHeartbeat { counts: None, ..alive }] {
        let item = raw::ScaleItem::from(ScaleItem::Alive(alive.clone()));
        assert_eq!(item.what, Some(raw::scale_item::What::SinceMs(7)));
        assert_eq!(ScaleItem::try_from(item), Ok(ScaleItem::Alive(alive)));
    }
    let earlier = raw::ScaleItem { what: Some(raw::scale_item::What::SinceMs(7)), alive: None };
    assert_eq!(ScaleItem::try_from(earlier), Ok(ScaleItem::Since(7)));
}

#[test]
fn earlier_releases_take_in_what_is_routed_unread() {
    let name = || NamespacedName::new("default", "hello");
    for item in [
        PodReportItem::NamesRouted,
        PodReportItem::Routed(name()),
        PodReportItem::RoutedNoMore(name()),
    ] {
        let raw = raw::PodItem::from(item.clone());
        let Some(raw::pod_item::What::Avoided(avoided)) = &raw.what else { panic!("{raw:?}") };
        assert_ne!(avoided.uid, "", "they refuse an item without a uid");
        assert_eq!(PodReportItem::try_from(raw), Ok(item));
    }
}

/// A decision keeps its inputs across the wire, and a decision of an older sender has none.
#[test]
fn a_decision_explains_itself_across_the_wire() {
    let inputs = ScaleDecisionInputs {
        in_flight: 300,
        waiting: 140,
        stable_window: Duration::from_secs(60),
        panic_window: Duration::from_secs(6),
        by_load: Some(5),
        min_scale: 1,
        max_scale: 3,
        bound: "max-scale".into(),
        sight: UsageCoverage::Partial,
    };
    for inputs in [Some(inputs), None] {
        let decision = ScaleDecision {
            revision: NamespacedName::new("default", "hello-00001"),
            wanted: Some(3),
            path: ConnectionPath::Direct,
            activators: 2,
            activity: RevisionActivity::Active,
            stable: 300.0,
            panic: 300.0,
            target: 70.0,
            ready_pods: 1,
            panicking: true,
            excess_burst_capacity: 0.0,
            reason: "max-scale".into(),
            inputs,
        };
        let told = ScaleDecision::try_from(raw::Decision::from(decision.clone())).unwrap();
        assert_eq!(told, decision);
    }
}

#[test]
fn slots_arrive_as_they_were_said() {
    let held = SlotsByPod::from([("p".into(), 2), ("q".into(), 1)]);
    let claim = SlotClaim {
        epoch: 7,
        seen: 3,
        held: held.clone(),
        need: 5,
        avoid: ["r".into()].into(),
        former: [("b".into(), held.clone())].into(),
        known: ["c".into()].into(),
    };
    let who =
        ComponentReplica { role: ComponentRole::Activator, name: "a".into(), node: "n".into() };
    let revision = name("default/hello-1");
    for item in [
        SlotClaimItem::Sender(who),
        SlotClaimItem::Claim(revision.clone(), claim),
        SlotClaimItem::Gone(revision.clone()),
        SlotClaimItem::Synced,
        SlotClaimItem::Bye,
    ] {
        assert_eq!(SlotClaimItem::try_from(raw::ClaimItem::from(item.clone())), Ok(item));
    }
    for keep in [None, Some(0), Some(2)] {
        let grant = SlotGrant { epoch: 7, number: 4, held: held.clone(), keep, acts: true };
        for item in [
            SlotGrantItem::Grant(revision.clone(), grant),
            SlotGrantItem::Gone(revision.clone()),
            SlotGrantItem::Synced,
        ] {
            assert_eq!(SlotGrantItem::try_from(raw::GrantItem::from(item.clone())), Ok(item));
        }
    }
    let empty = raw::ClaimItem { what: Some(raw::claim_item::What::Claim(raw::Claim::default())) };
    assert!(SlotClaimItem::try_from(empty).is_err(), "a claim names its revision");
    assert!(SlotGrantItem::try_from(raw::GrantItem { what: None }).is_err());
}
