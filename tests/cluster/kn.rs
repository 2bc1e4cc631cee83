//! Knative's own client, unchanged: commands that users and scripts run, each with the client's own wait for
//! completion.

use std::path::Path;

use serde_json::Value;
use tests::client_pod::{ClientPod, CurlResponse};
use tests::installed_cluster::RouseCluster;
use tests::test_cluster::retry_transport_errors;
use tests::tls_files::{TlsFiles, first_certificate, tls_secret};

/// Knative's client `kn` in one namespace.
struct KnClient<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
}

impl KnClient<'_> {
    fn run(&self, args: &[&str]) -> Result<String, String> {
        let args = [&["kn"][..], args, &["--namespace", self.namespace]].concat();
        retry_transport_errors(&args, || self.rouse.cluster.run(&args))
    }

    /// Waits until the gateway knows no such host.
    fn wait_unknown(&self, host: &str) {
        self.rouse.cluster.wait(&format!("{host} to be unknown"), || {
            (self.rouse.get_through_gateway(host, "/", &[]).status == 404).then_some(())
        });
    }

    /// Output of a command that must succeed.
    fn output(&self, args: &[&str]) -> String {
        self.run(args).unwrap_or_else(|error| panic!("kn {args:?}: {error}"))
    }

    /// Output of a command in JSON.
    fn json(&self, args: &[&str]) -> Value {
        let output = self.output(&[args, &["--output", "json"]].concat());
        serde_json::from_str(&output)
            .unwrap_or_else(|error| panic!("kn {args:?}: {error}: {output}"))
    }

    /// Line of a list for `name`, with single spaces between words.
    fn list_row(&self, args: &[&str], name: &str) -> String {
        let output = self.output(args);
        let line = output.lines().find(|line| line.split_whitespace().next() == Some(name));
        let cells: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
        cells.join(" ")
    }

    fn client(&self) -> &ClientPod {
        self.rouse.client_on("node1")
    }

    /// Response of the route or tag `name` inside of the cluster.
    fn get_route(&self, name: &str) -> CurlResponse {
        self.client().get(&self.rouse.service_url(self.namespace, name))
    }

    /// Creates the service `hello` from the sample application.
    fn create(&self, extra_words: &[&str]) -> String {
        let image = ["service", "create", "hello", "--image", "dev.local/hello:v1"];
        self.output(&[&image[..], &["--scale-window", "6s"], extra_words].concat())
    }
}

/// Runs `work` with Knative's client in a namespace of its own.
fn with_kn(test: &str, work: impl FnOnce(&KnClient<'_>)) {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace(test);
    work(&KnClient { rouse: &rouse, namespace: &namespace.name });
}

/// Asserts that `text` contains each of `parts`.
fn assert_contains_all(text: &str, parts: &[&str]) {
    let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
    assert!(missing.is_empty(), "{missing:?} missing in:\n{text}");
}

#[test]
fn kn_creates_updates_and_deletes_a_service() {
    with_kn("kn-life", |kn| {
        let output = kn.create(&["--env", "VERSION=v1"]);
        let host = format!("hello.{}.example.com", kn.namespace);
        let url = format!("http://{host}");
        let expected =
            "Service 'hello' created to latest revision 'hello-00001' is available at URL:";
        assert_contains_all(&output, &["Ready to serve.", expected, &url]);
        assert!(kn.get_route("hello").pod().starts_with("hello-00001-deployment-"));

        let row = kn.list_row(&["service", "list"], "hello");
        assert!(row.starts_with(&format!("hello {url} hello-00001")), "{row}");
        assert!(row.ends_with("3 OK / 3 True"), "{row}");
        let output = kn.output(&["service", "describe", "hello"]);
        let conditions = ["++ Ready", "++ ConfigurationsReady", "++ RoutesReady"];
        assert_contains_all(
            &output,
            &["100%  @latest (hello-00001) [1]", "dev.local/hello:v1", &url],
        );
        assert_contains_all(&output, &conditions);
        assert_eq!(kn.output(&["service", "describe", "hello", "--output", "url"]).trim(), url);

        let limits = ["--concurrency-limit", "5", "--scale-max", "3", "--label", "team=blue"];
        let update = ["service", "update", "hello", "--env", "VERSION=v2"];
        let output = kn.output(&[&update[..], &limits].concat());
        assert_contains_all(
            &output,
            &["Service 'hello' updated to latest revision 'hello-00002'", &url],
        );
        let spec = &kn.json(&["revision", "describe", "hello-00002"])["spec"];
        assert_eq!(spec["containerConcurrency"], 5, "{spec}");
        assert!(kn.get_route("hello").pod().starts_with("hello-00002-deployment-"));
        let gateway = kn.rouse.get_through_gateway(&host, "/", &[]);
        assert!(gateway.pod().starts_with("hello-00002-deployment-"), "{gateway}");

        let output = kn.output(&["service", "delete", "hello", "--wait"]);
        assert_contains_all(&output, &["Service 'hello' successfully deleted in namespace"]);
        // The object is gone before all activators know it.
        kn.wait_unknown(&host);
        let error = kn.run(&["service", "describe", "hello"]).expect_err("it is gone");
        assert_contains_all(&error, &["services.serving.knative.dev \"hello\" not found"]);
    });
}

#[test]
fn kn_splits_traffic_and_tags_revisions() {
    with_kn("kn-traffic", |kn| {
        kn.create(&["--env", "VERSION=v1"]);
        kn.output(&["service", "update", "hello", "--env", "VERSION=v2"]);
        let tags = ["--tag", "hello-00001=old", "--tag", "@latest=new"];
        let percents = ["--traffic", "old=100", "--traffic", "new=0"];
        kn.output(&[&["service", "update", "hello"][..], &tags, &percents].concat());
        for (name, revision) in
            [("hello", "hello-00001"), ("old-hello", "hello-00001"), ("new-hello", "hello-00002")]
        {
            let response = kn.get_route(name);
            assert!(response.pod().starts_with(revision), "{name}: {response}");
        }
        let output = kn.output(&["service", "describe", "hello"]);
        assert_contains_all(
            &output,
            &["100%  hello-00001 #old [1]", "@latest (hello-00002) #new [2]"],
        );
        let row = kn.list_row(&["revision", "list"], "hello-00001");
        assert!(row.starts_with("hello-00001 hello 100% old 1"), "{row}");
        assert!(row.ends_with("OK / 4 True"), "{row}");
        let url = format!("http://hello.{}.example.com", kn.namespace);
        assert_eq!(kn.list_row(&["route", "list"], "hello"), format!("hello {url} True"));
        assert_contains_all(
            &kn.output(&["route", "describe", "hello"]),
            &[&url, "++ AllTrafficAssigned"],
        );

        let half_each = ["--traffic", "hello-00001=50", "--traffic", "hello-00002=50"];
        kn.output(&[&["service", "update", "hello", "--untag", "old"][..], &half_each].concat());
        let output = kn.output(&["service", "describe", "hello"]);
        assert_contains_all(
            &output,
            &["50%  hello-00001 [1]", "50%  hello-00002 (current @latest) [2]"],
        );
        kn.wait_unknown(&format!("old-hello.{}.example.com", kn.namespace));

        kn.output(&["service", "update", "hello", "--traffic", "@latest=100"]);
        // Prune deletes revisions that are labelled as unused, which happens a moment after the route's change.
        kn.rouse.cluster.wait("the first revision to be in reserve", || {
            let revision = kn.json(&["revision", "describe", "hello-00001"]);
            let state = &revision["metadata"]["labels"]["serving.knative.dev/routingState"];
            (state == "reserve").then_some(())
        });
        kn.output(&["revision", "delete", "--prune", "hello", "--wait"]);
        assert_eq!(kn.list_row(&["revision", "list"], "hello-00001"), "");
        assert!(kn.get_route("hello").pod().starts_with("hello-00002-deployment-"));
    });
}

#[test]
fn kn_gives_a_service_a_domain() {
    with_kn("kn-domain", |kn| {
        kn.create(&[]);
        kn.output(&["service", "create", "other", "--image", "dev.local/hello:v1"]);
        let domain = format!("{}.example.org", kn.namespace);
        // As with Knative, an administrator grants the domain to a namespace.
        kn.rouse.claim_domain(&domain, kn.namespace);
        let output = kn.output(&["domain", "create", &domain, "--ref", "hello"]);
        assert_contains_all(&output, &[&format!("Domain mapping '{domain}' created in namespace")]);
        let wait_for_pod_of = |service: &str| {
            kn.rouse.cluster.wait(&format!("{domain} to lead to {service}"), || {
                let response = kn.rouse.get_through_gateway(&domain, "/", &[]);
                (response.status == 200 && response.pod().starts_with(service)).then_some(())
            });
        };
        wait_for_pod_of("hello-");
        kn.rouse.wait_ready(kn.namespace, "domainmapping", &domain);
        let row = kn.list_row(&["domain", "list"], &domain);
        assert_eq!(row, format!("{domain} http://{domain} True hello"));
        assert_contains_all(
            &kn.output(&["domain", "describe", &domain]),
            &[&domain, "hello", "Service", "++ Ready", "++ DomainClaimed", "++ ReferenceResolved"],
        );
        kn.output(&["domain", "update", &domain, "--ref", "other"]);
        wait_for_pod_of("other-");
        kn.output(&["domain", "delete", &domain]);
        kn.wait_unknown(&domain);
        let claim = ["clusterdomainclaim", domain.as_str()];
        let on_claim = |verb: &str| kn.rouse.cluster.kubectl(&[&[verb][..], &claim].concat());
        on_claim("get").expect("the claim is still there");
        on_claim("delete").expect("the claim may go");
    });
}

#[test]
fn kn_gives_a_domain_the_certificate_of_a_secret() {
    with_kn("kn-tls", |kn| {
        kn.create(&[]);
        let domain = format!("{}.example.org", kn.namespace);
        let folder = tempfile::tempdir().expect("a folder");
        let files = TlsFiles::new(folder.path(), &[&domain]);
        let pair = files.issue();
        let secret = tls_secret("web", &pair.chain_pem, &pair.key_pem);
        kn.rouse.apply(kn.namespace, &secret).expect("a Secret is taken");
        kn.rouse.claim_domain(&domain, kn.namespace);
        kn.output(&["domain", "create", &domain, "--ref", "hello", "--tls", "web"]);
        kn.rouse.wait_ready(kn.namespace, "domainmapping", &domain);
        let row = kn.list_row(&["domain", "list"], &domain);
        assert_eq!(row, format!("{domain} https://{domain} True hello"));
        let clients = kn.rouse.tls_clients(files.authority());
        kn.rouse.cluster.wait(&format!("the certificate of {domain}"), || {
            let expected = first_certificate(&pair.chain_pem);
            (clients.served_certificate(&domain) == expected).then_some(())
        });
        assert_eq!(clients.curl(&domain, &["--http2"]), "200 2");
        kn.output(&["domain", "delete", &domain]);
        let args = ["delete", "clusterdomainclaim", &domain];
        kn.rouse.cluster.kubectl(&args).expect("the claim is still there, and may go");
    });
}

#[test]
fn what_kn_exports_it_applies_and_imports_again() {
    with_kn("kn-export", |kn| {
        // With explicit names: generated names would be counted up again on import.
        kn.create(&["--env", "VERSION=v1", "--revision-name", "hello-first"]);
        let update = ["service", "update", "hello", "--env", "VERSION=v2"];
        kn.output(&[&update[..], &["--revision-name", "hello-second"]].concat());
        let percents = ["--traffic", "hello-first=30", "--traffic", "hello-second=70"];
        kn.output(&[&["service", "update", "hello"][..], &percents].concat());
        let folder = tempfile::tempdir().expect("a folder");
        let exported = |name: &str, args: &[&str]| {
            let args = [&["service", "export", "hello", "--output", "json"][..], args].concat();
            let file = folder.path().join(name);
            std::fs::write(&file, kn.output(&args)).expect("it is written");
            file
        };
        let service_path = exported("service.json", &[]);
        let export_path = exported("export.json", &["--with-revisions", "--mode", "export"]);
        let replay = exported("replay.json", &["--with-revisions", "--mode", "replay"]);
        // The export has only the fields that the user set.
        let service: Value = read(&service_path);
        assert!(service.get("status").is_none_or(Value::is_null), "{service}");

        kn.output(&["service", "delete", "hello", "--wait"]);
        let output = kn.output(&["service", "import", &export_path.to_string_lossy()]);
        assert_contains_all(
            &output,
            &["Service 'hello' imported to latest revision 'hello-second'"],
        );
        kn.rouse.wait_ready(kn.namespace, "ksvc", "hello");
        let output = kn.output(&["service", "describe", "hello"]);
        assert_contains_all(&output, &["30%  hello-first", "70%  hello-second"]);

        // Imported again step by step, in the order of the original changes.
        kn.output(&["service", "delete", "hello", "--wait"]);
        for step in read(&replay)["items"].as_array().expect("a list of services") {
            kn.rouse.apply(kn.namespace, &step.to_string()).expect("each step is taken");
            kn.rouse.wait_ready(kn.namespace, "ksvc", "hello");
        }
        let output = kn.output(&["service", "describe", "hello"]);
        assert_contains_all(&output, &["30%  hello-first", "70%  hello-second"]);

        let new = ["service", "apply", "hello", "--image", "dev.local/hello:v1"];
        let output = kn.output(&[&new[..], &["--env", "VERSION=v3"]].concat());
        assert_contains_all(&output, &["Service 'hello' applied to latest revision 'hello-00003'"]);
    });
}

fn read(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).expect("it was written");
    serde_json::from_str(&text).expect("kn exports JSON")
}

#[test]
fn kn_shows_why_a_service_is_refused_or_not_ready() {
    with_kn("kn-refused", |kn| {
        let create = ["service", "create", "hello"];
        let image = ["--image", "dev.local/hello:v1"];
        let assert_refused = |args: &[&str], expected_error: &str| {
            let error = kn.run(&[&create[..], args].concat()).expect_err("it is refused");
            assert_contains_all(&error, &[expected_error]);
        };
        let invalid_args = [&image[..], &["--concurrency-limit", "1001"]].concat();
        assert_refused(
            &invalid_args,
            "expected 0 <= 1001 <= 1000: spec.template.spec.containerConcurrency",
        );
        let invalid_args =
            [&image[..], &["--annotation-service", "serving.knative.dev/rollout-duration=1.5s"]];
        assert_refused(
            &invalid_args.concat(),
            "rollout-duration=1.5s is not at second precision: metadata.annotations.serving.knative.dev/rollout-duration",
        );
        assert_refused(&["--image", "dev.invalid/nobody/has:this"], "Unable to fetch image");
        // With `--force` and an image that exists, the service is replaced.
        let create_again = [&create[..], &image, &["--force"]].concat();
        assert_contains_all(
            &kn.output(&create_again),
            &["Service 'hello' replaced to latest revision 'hello-00002'"],
        );
        assert_eq!(kn.get_route("hello").status, 200);
    });
}
