//! Raw TCP of Knative Services, by the annotation `rouse.dev/protocol` of a template.

use common::wire::AppProtocol;

use super::*;

/// Applies the Service `hello`, which has the tag `now`, with this protocol and limits of its requests, and lets its
/// pods become ready.
fn apply_with_protocol(api_server: &mut FakeApiServer, image: &str, protocol: &str, limits: Value) {
    let mut template = template(image, 1);
    template["metadata"]["annotations"][key::PROTOCOL] = json!(protocol);
    for (field, value) in limits.as_object().into_iter().flatten() {
        template["spec"][field] = value.clone();
    }
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    let spec = json!({"template": template, "traffic": traffic});
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", spec);
    api_server.report_all_ready();
}

#[test]
fn a_service_of_raw_tcp_has_no_host_outside() {
    let mut api_server = FakeApiServer::new();
    apply_with_protocol(&mut api_server, "hello:v1", "tcp", json!({}));
    let table = api_server.table();
    let service = &table.services[&name("hello")];
    assert_eq!((service.protocol, &service.hosts[..]), (Some(AppProtocol::Tcp), &[] as &[String]));
    assert_eq!(table.revisions[&name("hello-00001")].protocol, AppProtocol::Tcp);
    let status = &api_server.object(ResourceKind::KnativeService, "hello")["status"];
    let url = json!("tcp://hello.default.svc.cluster.local:80");
    assert_eq!((&status["url"], &status["address"]["url"]), (&url, &url));
    let placeholder = api_server.object(ResourceKind::Service, "hello");
    assert_eq!(placeholder["spec"]["ports"][0]["appProtocol"], "tcp");
}

/// The gateway cannot find a service of raw TCP, so the mapping must not promise it.
#[test]
fn a_domain_of_raw_tcp_is_refused_until_http_returns() {
    let mut api_server = FakeApiServer::new();
    let domain = "www.shop.test";
    api_server.claim_domain(domain, NAMESPACE);
    api_server.map_domain(domain, "Service", "hello");
    apply_with_protocol(&mut api_server, "hello:v1", "tcp", json!({}));
    let resolved = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::DomainMapping, domain, "ReferenceResolved")
    };
    let refused = "False ResolveFailed: services.serving.knative.dev \"hello\" speaks raw TCP, which has a domain only within TLS: set spec.tls, or rouse.dev/tls: passthrough";
    assert_eq!(resolved(&api_server), refused);
    let rules = |api_server: &FakeApiServer| {
        let rules = api_server.table().services[&name("hello")].gateway_rules.clone();
        rules.map(|it| it.mapped_domains.len())
    };
    assert_eq!(rules(&api_server), None);
    apply_with_protocol(&mut api_server, "hello:v2", "http1", json!({}));
    assert_eq!((resolved(&api_server), rules(&api_server)), ("True : ".into(), Some(1)));
    let hosts = api_server.table().services[&name("hello")].hosts.clone();
    assert_eq!(hosts, ["hello.default.localhost"]);
}

#[test]
fn a_hard_limit_leads_raw_tcp_through_activators_and_rules_of_http_do_not() {
    let path = |protocol: &str, limits: Value, tag_headers: &str| {
        let mut api_server = FakeApiServer::new();
        let features = json!({"tag-header-based-routing": tag_headers});
        api_server.set_config_map("config-features", features);
        apply_with_protocol(&mut api_server, "hello:v1", protocol, limits);
        api_server.decide("hello-00001", 1);
        api_server.table().services[&name("hello")].connection_path
    };
    for protocol in ["http1", "tcp"] {
        assert_eq!(path(protocol, json!({}), "disabled"), ConnectionPath::Direct, "{protocol}");
        let limit = json!({"containerConcurrency": 1});
        assert_eq!(path(protocol, limit, "disabled"), ConnectionPath::Activator, "{protocol}");
    }
    // Only requests have such a header, and only responses this limit.
    let idle = json!({"idleTimeoutSeconds": 7});
    for (limits, tag_headers) in [(json!({}), "enabled"), (idle, "disabled")] {
        assert_eq!(path("http1", limits.clone(), tag_headers), ConnectionPath::Activator);
        assert_eq!(path("tcp", limits, tag_headers), ConnectionPath::Direct);
    }
}

/// An activator knows the protocol of a name before it chooses a Revision.
#[test]
fn a_name_that_is_shared_with_http_carries_raw_tcp() {
    let mut api_server = FakeApiServer::new();
    apply_with_protocol(&mut api_server, "hello:v1", "http1", json!({}));
    let mut second = template("hello:v2", 1);
    second["metadata"]["annotations"][key::PROTOCOL] = json!("tcp");
    let spec = |first: u8| {
        let traffic = json!([
            {"revisionName": "hello-00001", "percent": first, "tag": "first"},
            {"revisionName": "hello-00002", "percent": 100 - first, "tag": "second"},
        ]);
        json!({"template": second, "traffic": traffic})
    };
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", spec(50));
    api_server.report_all_ready();
    let protocols = |api_server: &FakeApiServer| {
        let table = api_server.table();
        ["hello", "first-hello", "second-hello"].map(|it| table.services[&name(it)].protocol)
    };
    let tcp = Some(AppProtocol::Tcp);
    assert_eq!(protocols(&api_server), [tcp, None, tcp]);
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", spec(100));
    assert_eq!(protocols(&api_server), [None, None, tcp]);
}

/// A client that waits for the server's first byte would get nothing from an activator that waits for its request.
#[test]
fn a_first_revision_that_is_not_ready_decides_the_protocol_of_its_name() {
    let mut api_server = FakeApiServer::new();
    let mut template = template("hello:v1", 1);
    template["metadata"]["annotations"][key::PROTOCOL] = json!("tcp");
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", json!({"template": template}));
    let table = api_server.table();
    let service = &table.services[&name("hello")];
    assert_eq!((service.targets.len(), service.protocol), (0, Some(AppProtocol::Tcp)));
}

/// Maps the domain to `hello`, with these annotations.
fn map_with(api_server: &mut FakeApiServer, domain: &str, annotations: Value) {
    map_with_tls(api_server, domain, annotations, Value::Null);
}

/// Maps the domain to `hello`, with these annotations and `spec.tls`.
fn map_with_tls(api_server: &mut FakeApiServer, domain: &str, annotations: Value, tls: Value) {
    let reference =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let body = json!({
        "apiVersion": "serving.knative.dev/v1beta1", "kind": "DomainMapping",
        "metadata": {"name": domain, "namespace": NAMESPACE, "annotations": annotations},
        "spec": {"ref": reference, "tls": tls},
    });
    for event in api_server.apply(ResourceKind::DomainMapping, &name(domain), body) {
        api_server.step(event);
    }
}

#[test]
fn a_domain_passes_tls_through_to_raw_tcp_only() {
    let mut api_server = FakeApiServer::new();
    let domain = "db.shop.test";
    api_server.claim_domain(domain, NAMESPACE);
    let passthrough = json!({key::TLS: key::TLS_PASSTHROUGH});
    map_with(&mut api_server, domain, passthrough.clone());
    apply_with_protocol(&mut api_server, "hello:v1", "http1", json!({}));
    let resolved = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::DomainMapping, domain, "ReferenceResolved")
    };
    let hosts = |api_server: &FakeApiServer| -> Vec<String> {
        let rules = api_server.table().services[&name("hello")].gateway_rules.clone();
        let domains = rules.into_iter().flat_map(|it| it.mapped_domains);
        domains.map(|it| format!("{} {:?}", it.host, it.protocol)).collect()
    };
    let http = "False ResolveFailed: services.serving.knative.dev \"hello\" speaks HTTP, and TLS is passed through to raw TCP only";
    assert_eq!((resolved(&api_server), hosts(&api_server)), (http.to_owned(), vec![]));
    apply_with_protocol(&mut api_server, "hello:v2", "tcp", json!({}));
    let passed = vec!["db.shop.test TlsPassthrough".to_owned()];
    assert_eq!((resolved(&api_server), hosts(&api_server)), ("True : ".to_owned(), passed));
    // The gateway cannot read what passes through, so such a host must not be open to all.
    let guarded = json!({key::TLS: key::TLS_PASSTHROUGH, key::CLIENT_CA: "clients"});
    map_with(&mut api_server, domain, guarded);
    let closed = "False ResolveFailed: The gateway cannot ask for client certificates in TLS that it passes through";
    assert_eq!((resolved(&api_server), hosts(&api_server)), (closed.to_owned(), vec![]));
}

#[test]
fn a_host_that_passes_tls_through_has_no_paths() {
    let mut api_server = FakeApiServer::new();
    let domain = "db.shop.test";
    api_server.claim_domain(domain, NAMESPACE);
    let mut passthrough = json!({key::TLS: key::TLS_PASSTHROUGH});
    map_with(&mut api_server, domain, passthrough.clone());
    apply_with_protocol(&mut api_server, "hello:v1", "tcp", json!({}));
    let resolved = |api_server: &FakeApiServer, mapping: &str| {
        api_server.condition(ResourceKind::DomainMapping, mapping, "ReferenceResolved")
    };
    let hosts = |api_server: &FakeApiServer| -> Vec<String> {
        let rules = api_server.table().services[&name("hello")].gateway_rules.clone();
        let domains = rules.into_iter().flat_map(|it| it.mapped_domains);
        domains.map(|it| format!("{} {}", it.host, it.path_rule.is_some())).collect()
    };
    assert_eq!(hosts(&api_server), ["db.shop.test false"]);
    let of_path = json!({key::HOST: domain, key::PATH_PREFIX: "/a"});
    map_with(&mut api_server, "path", of_path);
    let refused = "False ResolveFailed: services.serving.knative.dev \"hello\" speaks raw TCP, which has no paths, and DomainMapping \"default/path\" has a path prefix of db.shop.test";
    assert_eq!((resolved(&api_server, domain), hosts(&api_server)), (refused.to_owned(), vec![]));
    api_server.delete_as_user(ResourceKind::DomainMapping, "path");
    assert_eq!(resolved(&api_server, domain), "True : ");
    assert_eq!(hosts(&api_server), ["db.shop.test false"]);
    // Hosts below a wildcard are found by its rule, which is for all paths.
    passthrough[key::HOST] = json!("*.db.shop.test");
    map_with(&mut api_server, "below", passthrough);
    assert_eq!(resolved(&api_server, "below"), "True : ");
    let mut all = hosts(&api_server);
    all.sort();
    assert_eq!(all, ["*.db.shop.test true", "db.shop.test false"]);
}

/// A host of raw TCP has a certificate of its own, by which the gateway ends TLS.
#[test]
fn a_domain_with_a_certificate_leads_to_raw_tcp() {
    let mut api_server = FakeApiServer::new();
    let domain = "db.shop.test";
    api_server.claim_domain(domain, NAMESPACE);
    apply_with_protocol(&mut api_server, "hello:v1", "tcp", json!({}));
    let mapped = |api_server: &FakeApiServer| -> Vec<String> {
        let rules = api_server.table().services[&name("hello")].gateway_rules.clone();
        let domains = rules.into_iter().flat_map(|it| it.mapped_domains);
        let text = |it: common::wire::MappedDomain| {
            let certificate = it.certificate.map(|it| it.to_string());
            format!("{} {:?} {certificate:?} {}", it.host, it.protocol, it.client_auth.is_some())
        };
        domains.map(text).collect()
    };
    let tls = json!({"secretName": "db"});
    map_with_tls(&mut api_server, domain, json!({}), tls.clone());
    let resolved = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::DomainMapping, domain, "ReferenceResolved")
    };
    assert_eq!(resolved(&api_server), "True : ");
    assert_eq!(mapped(&api_server), ["db.shop.test TcpOverTls Some(\"default/db\") false"]);
    map_with_tls(&mut api_server, domain, json!({key::CLIENT_CA: "clients"}), tls.clone());
    assert_eq!(mapped(&api_server), ["db.shop.test TcpOverTls Some(\"default/db\") true"]);
    map_with(&mut api_server, "path", json!({key::HOST: domain, key::PATH_PREFIX: "/a"}));
    assert!(resolved(&api_server).contains("which has no paths"), "{}", resolved(&api_server));
    assert_eq!(mapped(&api_server), [""; 0]);
    api_server.delete_as_user(ResourceKind::DomainMapping, "path");
    map_with(&mut api_server, domain, json!({}));
    assert!(resolved(&api_server).contains("set spec.tls"), "{}", resolved(&api_server));
    assert_eq!(mapped(&api_server), [""; 0]);
    map_with_tls(&mut api_server, domain, json!({}), tls);
    apply_with_protocol(&mut api_server, "hello:v2", "http1", json!({}));
    assert_eq!(mapped(&api_server), ["db.shop.test Http Some(\"default/db\") false"]);
}

/// The server behind it has the certificate of a host whose TLS is passed through.
#[test]
fn a_certificate_is_requested_for_tls_that_ends_at_the_gateway_only() {
    let mut api_server = FakeApiServer::new();
    api_server.set_config_map("config-network", json!({"external-domain-tls": "Enabled"}));
    let domain = "db.shop.test";
    api_server.claim_domain(domain, NAMESPACE);
    apply_with_protocol(&mut api_server, "hello:v1", "tcp", json!({}));
    let condition = |api_server: &FakeApiServer, condition_type: &str| {
        api_server.condition(ResourceKind::DomainMapping, domain, condition_type)
    };
    let passthrough = json!({key::TLS: key::TLS_PASSTHROUGH});
    for (annotations, is_requested) in
        [(passthrough.clone(), false), (json!({}), true), (passthrough, false)]
    {
        map_with(&mut api_server, domain, annotations);
        assert_eq!(condition(&api_server, "ReferenceResolved"), "True : ");
        let requested = api_server.names(ResourceKind::RequestedCertificate);
        assert_eq!(requested.contains(&name(domain)), is_requested);
        let provisioned = condition(&api_server, "CertificateProvisioned");
        assert_eq!(provisioned.contains("TLS is passed through"), !is_requested, "{provisioned}");
    }
}
