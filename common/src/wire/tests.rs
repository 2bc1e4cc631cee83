use super::*;
use crate::{fixtures, request_log::LogTemplate};

mod certificates;
mod client_auth;
mod gateway_hosts;
mod path_rules;
mod scaled_services;
mod standby;

fn hsts() -> HstsPolicy {
    HstsPolicy::parse("max-age=31536000; includeSubDomains").expect("a good policy")
}

fn name(text: &str) -> NamespacedName {
    text.parse().expect("a valid name")
}

fn activator(name: &str) -> ActivatorEntry {
    ActivatorEntry {
        name: name.into(),
        node: "n1".into(),
        zone: String::new(),
        addresses: Vec::new(),
        gets_all_reports: true,
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
    view.begin_stream();
    assert_eq!(view.apply_item(item(1, RouteChange::Activator(activator("a")))), None);
    assert_eq!(view.apply_item(item(2, RouteChange::Activator(activator("b")))), None);
    assert_eq!(view.apply_item(item(2, RouteChange::Synced)).map(|keys| keys.len()), Some(2));

    view.begin_stream();
    assert_eq!(view.apply_item(item(7, RouteChange::Activator(activator("b")))), None);
    assert!(
        view.table.activators.contains_key("a"),
        "the old table holds until the new one is whole"
    );
    let removed = RouteKey::Activator("a".into());
    assert!(
        view.apply_item(item(7, RouteChange::Synced)).expect("a whole table").contains(&removed)
    );
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
    let node = |name: &str, zone: &str| NodeEntry { name: name.into(), zone: zone.into() };
    have.nodes.insert("n1".into(), node("n1", "a"));
    have.nodes.insert("n2".into(), node("n2", "a"));
    want.nodes.insert("n1".into(), node("n1", "b"));

    let mut view = RouteView::default();
    for change in have.all_states().chain(have.changes_to(&want)) {
        view.apply_item(item(1, change));
    }
    assert_eq!(view.table, want);
    assert_eq!(want.changes_to(&want), []);
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
    let error = PodEntry::try_from(raw.clone()).expect_err("no address");
    assert_eq!(error.to_string(), "field pod.address is \"\": a ready pod has an address");
    let also = vec![7; 16];
    let addressed = raw::Pod { address: vec![10, 0, 0, 7], also, confirmed: true, ..raw };
    let pod = PodEntry::try_from(addressed.clone()).expect("an address");
    assert_eq!(pod.hints, TopologyHints::default(), "an earlier sender knows no hints");
    let back = raw::Pod::from(pod);
    assert_eq!((&back.address, &back.also), (&addressed.address, &addressed.also));
    assert!(back.confirmed && !back.by_report);
}

#[test]
fn only_a_starting_pod_with_an_address_awaits_a_report() {
    let revision = name("default/hello-00001");
    let sent = |phase, address| {
        let pod = crate::fixtures::pod("uid", &revision, phase);
        let pod = PodEntry { address, awaits_report: true, ..pod };
        PodEntry::try_from(raw::Pod::from(pod)).expect("valid").awaits_report
    };
    let address = Some(([10, 0, 0, 7], 8080).into());
    assert!(sent(RoutingPhase::Starting, address));
    assert!(!sent(RoutingPhase::Starting, None));
    assert!(!sent(RoutingPhase::Ready, address));
    assert!(!sent(RoutingPhase::Draining, address));
}

/// An earlier release knows neither side: its agents do not ask, and its controllers answer nothing.
#[test]
fn the_question_about_a_stop_and_its_answer_survive_the_wire() {
    let earlier = raw::PodSeen { uid: "p".into(), ..raw::PodSeen::default() };
    let seen = PodObservation::try_from(earlier).expect("valid");
    assert!(!seen.awaits_stop);
    let asks = PodObservation { awaits_stop: true, ..seen };
    assert_eq!(PodObservation::try_from(raw::PodSeen::from(asks.clone())), Ok(asks));
    let revision = name("default/hello-00001");
    for container_restarts in [false, true] {
        let pod = crate::fixtures::pod("p", &revision, RoutingPhase::Starting);
        let pod = PodEntry { container_restarts, ..pod };
        assert_eq!(PodEntry::try_from(raw::Pod::from(pod.clone())), Ok(pod));
    }
}

#[test]
fn hints_of_a_pod_and_the_zone_of_a_node_survive_the_wire() {
    let hints = TopologyHints { zone: "a".into(), node: "n1".into() };
    let revision = name("default/hello-00001");
    let pod = PodEntry { hints, ..crate::fixtures::pod("uid", &revision, RoutingPhase::Starting) };
    let node = NodeEntry { name: "n1".into(), zone: "a".into() };
    for change in [
        RouteChange::Pod(pod.into()),
        RouteChange::Node(node),
        RouteChange::Removed(RouteKey::Node("n1".into())),
    ] {
        let item = item(3, change);
        assert_eq!(RouteItem::try_from(raw::RouteItem::from(item.clone())), Ok(item));
    }
    let without_zone = raw::Node { name: "n1".into(), zone: String::new() };
    let error = NodeEntry::try_from(without_zone).expect_err("it would say nothing");
    assert_eq!(error.to_string(), "field node.zone is \"\": must not be empty");
}

/// A service from a sender of the previous release, which omits the newer fields, is accepted.
#[test]
fn a_service_from_a_sender_that_knows_no_gateway_rules_is_accepted() {
    let old = raw::Service {
        name: "default/hello".into(),
        port: 80,
        activator_port: 20_000,
        path: raw::Path::Direct.into(),
        hosts: vec!["hello.default.example.com".into()],
        ..raw::Service::default()
    };
    let received = ServiceEntry::try_from(old).expect("valid");
    assert_eq!((received.gateway_rules, received.awaits_agents), (None, false));
}

#[test]
fn the_wait_for_agents_survives_the_wire() {
    let name = NamespacedName::new("default", "hello");
    for awaits_agents in [true, false] {
        let service = ServiceEntry { awaits_agents, ..crate::fixtures::service(&name, &name) };
        assert_eq!(ServiceEntry::try_from(raw::Service::from(service.clone())), Ok(service));
    }
}

#[test]
fn gateway_rules_of_a_service_survive_the_wire() {
    let tag = |tag: &str| RouteTag {
        name: tag.into(),
        service: NamespacedName::new("default", "blue-hello"),
    };
    for tag_routing in [
        None,
        Some(TagRouting::ChooseTag(vec![tag("blue")])),
        Some(TagRouting::ServeTag("b".into())),
    ] {
        let domain = |host_rewrite: Option<String>| MappedDomain {
            redirects_to_https: true,
            // One domain has all optional fields, and the other one none.
            certificate: host_rewrite.is_some().then(|| name("default/a-example")),
            hsts: host_rewrite.is_some().then(hsts),
            host_rewrite,
            ..fixtures::mapped_domain("a.example")
        };
        let mapped_domains = vec![domain(None), domain(Some("hello.default.svc".into()))];
        let challenges = vec![HttpChallenge {
            host: "a.example".into(),
            token: "t".into(),
            response: "t.hash".into(),
        }];
        let ingress = GatewayRules {
            redirects_to_https: true,
            mapped_domains,
            gateway_port: NonZeroU16::new(5432).filter(|_| tag_routing.is_some()),
            tag_routing,
            challenges,
            reserved_hosts: vec!["b.example".into()],
        };
        assert_eq!(GatewayRules::try_from(raw::Ingress::from(ingress.clone())), Ok(ingress));
    }
    let large = raw::Ingress { gateway_port: 65_536, ..raw::Ingress::default() };
    let error = GatewayRules::try_from(large).expect_err("no port");
    assert_eq!(error.to_string(), "field ingress.gateway_port is \"65536\": must be a port, or 0");
    let nameless = raw::Domain::default();
    let error = MappedDomain::try_from(nameless).expect_err("no host");
    assert_eq!(error.to_string(), "field domain.host is \"\": must not be empty");
}

#[test]
fn the_integral_counts_open_and_closed_requests() {
    let mut totals = RequestTotals::default();
    totals.record_start(10);
    assert_eq!(totals.in_flight_integral(15), 5);
    totals.record_start(20);
    assert_eq!(totals.in_flight_integral(30), 30);
    totals.record_finish(30);
    totals.record_finish(40);
    assert_eq!((totals.in_flight(), totals.in_flight_integral(50)), (0, 20 + 20));
}

#[test]
fn all_requests_in_flight_end_as_one_after_the_other_does() {
    let mut totals = RequestTotals::default();
    [10, 20, 30].into_iter().for_each(|at| totals.record_start(at));
    totals.record_finish(40);
    let mut one_by_one = totals;
    [50, 50].into_iter().for_each(|at| one_by_one.record_finish(at));
    totals.finish_all(50);
    assert_eq!(totals, one_by_one);
    totals.finish_all(60);
    assert_eq!(totals, one_by_one, "none is left");
}

/// Returns telemetry whose settings are all set.
fn telemetry() -> TelemetrySettings {
    let collector = |protocol, text| OtlpCollector::parse(protocol, text).expect("a URL");
    let traces = TraceSettings {
        collector: collector(OtlpProtocol::Grpc, "http://a:1"),
        sampling: SamplingRate::from_fraction(0.25),
    };
    let metrics = RequestMetricsSettings {
        collector: Some(collector(OtlpProtocol::HttpProtobuf, "http://[::1]:2/v1/metrics")),
        interval: Duration::from_secs(30),
    };
    TelemetrySettings { traces: Some(traces), metrics: Some(metrics) }
}

#[test]
fn telemetry_that_this_component_does_not_support_is_refused() {
    type Change = fn(&mut raw::Telemetry);
    let changes: [(Change, &str); 5] = [
        (|it| it.traces.as_mut().expect("set").sampling_threshold = u64::MAX, "sampling_threshold"),
        (|it| it.traces.as_mut().expect("set").collector = None, "traces.collector"),
        (|it| it.metrics.as_mut().expect("set").interval_ms = 0, "interval_ms"),
        (
            |it| {
                let collector = &mut it.traces.as_mut().expect("set").collector;
                collector.as_mut().expect("set").protocol = 7;
            },
            "collector.protocol",
        ),
        (
            |it| {
                let collector = &mut it.traces.as_mut().expect("set").collector;
                collector.as_mut().expect("set").endpoint = "https://a".into();
            },
            "collector.endpoint",
        ),
    ];
    // One field at a time, so that each refusal is for the field that was changed.
    for (change, field) in changes {
        let mut message = raw::Telemetry::from(telemetry());
        change(&mut message);
        let error = TelemetrySettings::try_from(message).expect_err("a bad value");
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[test]
fn settings_are_sent_once_for_all_services_and_only_if_not_default() {
    let template = LogTemplate::parse("{{.Request.Method}}").expect("a good template");
    let levels =
        LogLevels { agent: LogLevel::Debug, autoscaler: LogLevel::Error, ..LogLevels::default() };
    let edge = EdgeSettings {
        trusted_proxies: vec!["10.0.0.0/8".parse().expect("a network")],
        requires_proxy_protocol: true,
        allowed_upgrades: vec!["foo/2".into()],
        allows_underscores: true,
        certificates: vec![name("rouse-system/wildcard"), name("rouse-system/shop.tls")],
        https_port: NonZeroU16::new(8443),
        hsts: Some(hsts()),
        tls: TlsSettings {
            min_version: TlsMinVersion::Tls13,
            ciphers: vec![TlsCipher::Aes128GcmSha256, TlsCipher::EcdheRsaAes128GcmSha256],
        },
        is_sni_strict: true,
        tcp_idle_timeout: Some(Duration::from_millis(90_500)),
        trusted_ingresses: vec!["10.244.0.0/16".parse().expect("a network")],
    };
    let settings = GlobalSettings {
        request_log: Some(RequestLogSettings { template, logs_probes: true }),
        log_levels: levels,
        edge,
        telemetry: telemetry(),
    };
    let usual = RouteTable::default();
    let logged = RouteTable { settings: settings.clone(), ..RouteTable::default() };
    let sent = RouteChange::Settings(settings);
    assert_eq!(logged.all_states().collect::<Vec<_>>(), std::slice::from_ref(&sent));
    assert_eq!(usual.all_states().count(), 0);
    assert_eq!(usual.changes_to(&logged), std::slice::from_ref(&sent));
    assert_eq!(logged.changes_to(&usual), [RouteChange::Removed(RouteKey::Settings)]);
    for change in [sent, RouteChange::Removed(RouteKey::Settings)] {
        let item = item(3, change);
        assert_eq!(RouteItem::try_from(raw::RouteItem::from(item.clone())), Ok(item));
    }

    let mut view = RouteView::default();
    view.begin_stream();
    for change in logged.all_states().chain([RouteChange::Synced]) {
        view.apply_item(item(1, change));
    }
    assert_eq!(view.table, logged);
    // A new stream replaces the table: what it does not name is gone at its end.
    view.begin_stream();
    let gone = view.apply_item(item(1, RouteChange::Synced)).expect("a whole table");
    assert!(gone.contains(&RouteKey::Settings));
    assert_eq!(view.table, usual, "a table that says nothing of them means the usual ones");
}

#[test]
fn a_template_that_this_component_does_not_support_is_refused() {
    let log = raw::RequestLog { template: "{{if}}".into(), probes: false };
    let settings = raw::Settings { request_log: Some(log), ..raw::Settings::default() };
    let error = GlobalSettings::try_from(settings).expect_err("no such function");
    assert!(error.to_string().starts_with("field request_log.template is "), "{error}");
}

#[test]
fn earlier_releases_read_a_heartbeat_as_what_they_know() {
    let alive = AutoscalerHeartbeat {
        since_ms: 7,
        observed_ms: 61_000,
        covers_all_windows: true,
        reporters: 4,
        active_autoscaler: Some("autoscaler-1".into()),
    };
    for alive in [alive.clone(), AutoscalerHeartbeat { active_autoscaler: None, ..alive }] {
        let item = raw::ScaleItem::from(ScaleItem::Heartbeat(alive.clone()));
        assert_eq!(item.what, Some(raw::scale_item::What::SinceMs(7)));
        assert_eq!(ScaleItem::try_from(item), Ok(ScaleItem::Heartbeat(alive)));
    }
    let earlier = raw::ScaleItem { what: Some(raw::scale_item::What::SinceMs(7)), alive: None };
    assert_eq!(ScaleItem::try_from(earlier), Ok(ScaleItem::Since(7)));
}

#[test]
fn earlier_releases_accept_other_reports_of_services_and_pods_unread() {
    let name = || NamespacedName::new("default", "hello");
    for item in [
        PodReportItem::PassedOver("uid".into()),
        PodReportItem::PassedOverRemoved("uid".into()),
        PodReportItem::RoutedServicesAnnounced,
        PodReportItem::AwaitedServicesAnnounced,
        PodReportItem::RoutedService(name()),
        PodReportItem::RoutedServiceRemoved(name()),
    ] {
        let raw = raw::PodItem::from(item.clone());
        let Some(raw::pod_item::What::Avoided(avoided)) = &raw.what else { panic!("{raw:?}") };
        assert_eq!(avoided.uid, "-", "they refuse an item without a uid, and know no such pod");
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
        desired_by_load: Some(5),
        min_scale: 1,
        max_scale: 3,
        applied_bound: "max-scale".into(),
        coverage: UsageCoverage::Partial,
    };
    let client = Some(IpAddr::from([10, 244, 1, 7]));
    let origins = [Some(Box::new(WakeOrigin { activator: "a".into(), client })), None];
    for (inputs, wake_origin) in [Some(inputs), None].into_iter().zip(origins) {
        let decision = ScaleDecision {
            revision: NamespacedName::new("default", "hello-00001"),
            requested_scale: Some(3),
            connection_path: ConnectionPath::Direct,
            activator_count: 2,
            activity: RevisionActivity::Active,
            stable_load: 300.0,
            panic_load: 300.0,
            target_load: 70.0,
            ready_pods: 1,
            is_panicking: true,
            excess_burst_capacity: 0.0,
            reason: "max-scale".into(),
            inputs,
            wake_origin,
        };
        let received = ScaleDecision::try_from(raw::Decision::from(decision.clone())).unwrap();
        assert_eq!(received, decision);
    }
}

/// Load and decisions must not be lost because of what only a preference depends on.
#[test]
fn an_invalid_origin_of_a_wake_counts_as_not_known() {
    let key = raw::UsageKey { revision: "default/hello-00001".into(), pod: String::new() };
    let sample = |client: &[u8]| {
        let (key, client) = (Some(key.clone()), client.to_vec());
        let sample = raw::UsageSeen { key, started: 1, client, ..raw::UsageSeen::default() };
        UsageSample::try_from(sample).expect("its totals are valid")
    };
    assert_eq!([sample(&[]).client, sample(&[10, 244, 1]).client], [None, None]);
    let (address, known) = (IpAddr::from([10, 244, 1, 7]), sample(&[10, 244, 1, 7]));
    assert_eq!((known.client, known.totals.started), (Some(address), 1));
    assert_eq!(UsageSample::try_from(raw::UsageSeen::from(known.clone())), Ok(known));

    let decision = |activator: &str, client: &[u8]| {
        let origin = raw::WakeOrigin { activator: activator.into(), client: client.to_vec() };
        let decision = raw::Decision {
            revision: "default/hello-00001".into(),
            path: raw::Path::Direct.into(),
            activity: raw::Activity::Activating.into(),
            origin: Some(origin),
            ..raw::Decision::default()
        };
        ScaleDecision::try_from(decision).expect("it decides something").wake_origin
    };
    // An address that cannot be read leaves the activator, and an origin without an activator is none.
    let of_activator = WakeOrigin { activator: "a".into(), client: None };
    assert_eq!(decision("a", &[1]).as_deref(), Some(&of_activator));
    assert_eq!(decision("", &[10, 244, 1, 7]), None);
}

#[test]
fn slots_arrive_as_they_were_sent() {
    let held = SlotsByPod::from([("p".into(), 2), ("q".into(), 1)]);
    let claim = SlotClaim {
        owner_term: 7,
        applied_grant: 3,
        held: held.clone(),
        needed: 5,
        unusable_pods: ["r".into()].into(),
        former_grants: [("b".into(), held.clone())].into(),
        live_activators: ["c".into()].into(),
    };
    let sender =
        ComponentReplica { role: ClientComponent::Activator, name: "a".into(), node: "n".into() };
    let revision = name("default/hello-1");
    for item in [
        SlotClaimItem::Sender(sender),
        SlotClaimItem::Claim(revision.clone(), claim),
        SlotClaimItem::Removed(revision.clone()),
        SlotClaimItem::Synced,
        SlotClaimItem::Goodbye,
    ] {
        assert_eq!(SlotClaimItem::try_from(raw::ClaimItem::from(item.clone())), Ok(item));
    }
    for keep_limit in [None, Some(0), Some(2)] {
        let grant = SlotGrant {
            owner_term: 7,
            grant_number: 4,
            held: held.clone(),
            keep_limit,
            is_acting: true,
        };
        for item in [
            SlotGrantItem::Grant(revision.clone(), grant),
            SlotGrantItem::Removed(revision.clone()),
            SlotGrantItem::Synced,
        ] {
            assert_eq!(SlotGrantItem::try_from(raw::GrantItem::from(item.clone())), Ok(item));
        }
    }
    // Items of a later release, whose kind is not known, look like empty ones.
    let empty = raw::ClaimItem { what: Some(raw::claim_item::What::Claim(raw::Claim::default())) };
    assert!(SlotClaimItem::try_from(empty).is_err(), "a claim names its revision");
    assert!(SlotGrantItem::try_from(raw::GrantItem { what: None }).is_err());
}
