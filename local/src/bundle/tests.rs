use super::*;

fn container(yaml: Value) -> Container {
    serde_json::from_value(yaml).unwrap()
}

fn image(json: Value) -> ImageConfig {
    serde_json::from_value(json).unwrap()
}

struct BundleFixture {
    labels: BTreeMap<String, String>,
    volumes: BTreeMap<String, PathBuf>,
    addresses: Vec<IpAddr>,
}

impl BundleFixture {
    fn new() -> Self {
        Self {
            labels: BTreeMap::from([("app".to_owned(), "shop".to_owned())]),
            volumes: BTreeMap::from([("data".to_owned(), PathBuf::from("/v/data"))]),
            addresses: vec!["10.244.1.0".parse().unwrap()],
        }
    }

    fn context(&self) -> BundleContext<'_> {
        BundleContext {
            node: "n",
            uid: "u1",
            pod: "hello-00001-deployment-1",
            namespace: "default",
            labels: &self.labels,
            addresses: &self.addresses,
            network: Path::new("/run/rouse/n/netns/u1"),
            rootfs: Path::new("/b/rootfs"),
            etc: Path::new("/b"),
            termination_log: Path::new("/b/termination-log"),
            cgroup: Path::new("rouse-n/pods/podu1/web"),
            volumes: &self.volumes,
            sub_paths: Path::new("/b/sub-paths"),
            passwd: "root:x:0:0::/:/bin/sh\nweb:x:33:34::/:/bin/sh\n",
            group: "root:x:0:\nwww:x:34:\nextra:x:50:web,other\n",
        }
    }
}

fn spec_json(container_json: Value, image_json: Value) -> Result<Value, BundleError> {
    let fixture = BundleFixture::new();
    let spec = build_spec(
        &PodSpec::default(),
        &container(container_json),
        Some(&image(image_json)),
        &fixture.context(),
    )?;
    Ok(serde_json::to_value(spec).unwrap())
}

#[test]
fn the_image_s_stop_signal_is_recorded() {
    let command = json!({ "name": "a", "command": ["/a"] });
    let spec = spec_json(command.clone(), json!({ "StopSignal": "SIGQUIT" })).unwrap();
    assert_eq!(spec["annotations"], json!({ STOP_SIGNAL_ANNOTATION: "SIGQUIT" }));
    assert_eq!(spec_json(command, json!({})).unwrap()["annotations"], json!(null));
}

#[test]
fn command_and_args_replace_the_image_s_as_in_kubernetes() {
    for (command, args, expected) in [
        (json!(null), json!(null), json!(["/ep", "cmd"])),
        (json!(null), json!(["a"]), json!(["/ep", "a"])),
        (json!(["/c"]), json!(null), json!(["/c"])),
        (json!(["/c"]), json!(["$(A)", "$$(A)", "$(NONE)"]), json!(["/c", "1", "$(A)", "$(NONE)"])),
        // Variables of the image and of the node are no variables of the container.
        (json!(["/c"]), json!(["$(PATH)"]), json!(["/c", "$(PATH)"])),
    ] {
        let container = json!({
            "name": "web", "command": command, "args": args, "env": [{ "name": "A", "value": "1" }],
        });
        let spec = spec_json(container, json!({ "Entrypoint": ["/ep"], "Cmd": ["cmd"] })).unwrap();
        assert_eq!(spec["process"]["args"], expected);
    }
    assert_eq!(spec_json(json!({ "name": "web" }), json!({})), Err(BundleError::NoCommand));
}

#[test]
fn the_environment_of_the_container_wins_over_that_of_the_image() {
    let container = json!({ "name": "web", "command": ["/c"], "env": [
        { "name": "PORT", "value": "8080" },
        { "name": "URL", "value": "http://$(IP):$(PORT)" },
        { "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } },
        { "name": "APP", "valueFrom": { "fieldRef": { "fieldPath": "metadata.labels['app']" } } },
        { "name": "AT", "value": "$(IP):$(PORT)" },
        { "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } },
    ] });
    let spec = spec_json(container, json!({ "Env": ["PATH=/image", "PORT=1", "LANG=C"] })).unwrap();
    let expected = json!([
        "PATH=/image",
        "HOSTNAME=hello-00001-deployment-1",
        "PORT=8080",
        "LANG=C",
        "URL=http://$(IP):8080",
        "IP=10.244.1.0",
        "APP=shop",
        "AT=10.244.1.0:8080",
        "NODE=n",
    ]);
    assert_eq!(spec["process"]["env"], expected);
}

#[test]
fn users_are_found_by_name_or_number() {
    for (image_json, uid, gid, groups) in [
        (json!({}), 0, 0, json!([])),
        (json!({ "User": "web" }), 33, 34, json!([50])),
        (json!({ "User": "33" }), 33, 34, json!([50])),
        (json!({ "User": "web:extra" }), 33, 50, json!([50])),
        (json!({ "User": "1000:2000" }), 1000, 2000, json!([])),
    ] {
        let container = json!({ "name": "web", "command": ["/c"] });
        let spec = spec_json(container, image_json.clone()).unwrap();
        let user = &spec["process"]["user"];
        let ids = (user["uid"].as_u64(), user["gid"].as_u64());
        assert_eq!(ids, (Some(uid), Some(gid)), "{image_json}");
        let gids = user.get("additionalGids").cloned().unwrap_or(json!([]));
        assert_eq!(gids, groups, "{image_json}");
    }
    let unknown =
        spec_json(json!({ "name": "web", "command": ["/c"] }), json!({ "User": "nobody" }));
    assert_eq!(unknown, Err(BundleError::UnknownUser("nobody".to_owned())));
    let container =
        json!({ "name": "web", "command": ["/c"], "securityContext": { "runAsUser": 33 } });
    let spec = spec_json(container, json!({ "User": "nobody" })).unwrap();
    assert_eq!(spec["process"]["user"]["gid"], 34, "the number replaces the unknown user");
    let container =
        json!({ "name": "web", "command": ["/c"], "securityContext": { "runAsNonRoot": true } });
    assert_eq!(spec_json(container, json!({})), Err(BundleError::RunsAsRoot));
}

#[test]
fn capabilities_are_dropped_and_added_and_held_by_root_only() {
    let context = json!({ "capabilities": { "drop": ["ALL"], "add": ["NET_BIND_SERVICE"] } });
    let container = json!({ "name": "web", "command": ["/c"], "securityContext": context });
    let spec = spec_json(container, json!({})).unwrap();
    let capabilities = &spec["process"]["capabilities"];
    assert_eq!(capabilities["effective"], json!(["CAP_NET_BIND_SERVICE"]));
    let container =
        json!({ "name": "web", "command": ["/c"], "securityContext": { "runAsUser": 1 } });
    let spec = spec_json(container, json!({})).unwrap();
    assert_eq!(spec["process"]["capabilities"]["effective"], json!([]));
}

#[test]
fn volumes_are_mounted_at_their_mount_paths() {
    let volume_mount = |mount: Value| {
        let container = json!({ "name": "web", "command": ["/c"], "volumeMounts": [mount] });
        let spec = spec_json(container, json!({})).unwrap();
        let mut mounts = spec["mounts"].as_array().unwrap().iter();
        mounts.find(|it| it["destination"] == "/data").unwrap().clone()
    };
    let mount = json!({ "name": "data", "mountPath": "/data", "readOnly": true, "subPath": "x" });
    let expected = json!({
        "destination": "/data", "type": "bind", "source": "/b/sub-paths/0",
        "options": ["rbind", "ro"],
    });
    assert_eq!(volume_mount(mount), expected);
    let whole = json!({ "name": "data", "mountPath": "/data", "subPath": "" });
    assert_eq!(volume_mount(whole)["source"], "/v/data");
    let container = json!({
        "name": "web", "command": ["/c"], "volumeMounts": [{ "name": "none", "mountPath": "/x" }],
    });
    assert_eq!(spec_json(container, json!({})), Err(BundleError::UnknownVolume("none".to_owned())));
}

#[test]
fn no_mount_hides_one_below_its_path() {
    let at = |path: &str| json!({ "name": "data", "mountPath": path });
    let volumes = [at("/data/inner"), at("/data/"), at("/etc")];
    let container = json!({ "name": "web", "command": ["/c"], "volumeMounts": volumes });
    let spec = spec_json(container, json!({})).unwrap();
    let mounts = spec["mounts"].as_array().unwrap();
    let position = |path: &str| mounts.iter().position(|it| it["destination"] == path).unwrap();
    for (outer, inner) in [
        ("/data/", "/data/inner"),
        ("/etc", "/etc/hosts"),
        ("/etc", "/etc/resolv.conf"),
        ("/dev", "/dev/termination-log"),
    ] {
        assert!(position(outer) < position(inner), "{outer} {inner}");
    }
}

#[test]
fn limits_are_read_from_resources() {
    let one = json!({ "name": "web", "resources": {
        "limits": { "cpu": "500m", "memory": "64Mi" }, "requests": { "cpu": "250m" },
    } });
    let limits = parse_limits(&container(one)).unwrap();
    let expected =
        ContainerLimits { memory: Some(64 << 20), cpu_milli: Some(500), cpu_shares: Some(256) };
    assert_eq!(limits, expected);
    let zero = json!({ "name": "web", "resources": { "limits": { "cpu": "0", "memory": "0Mi" } } });
    assert_eq!(parse_limits(&container(zero)), Ok(ContainerLimits::default()));
}

#[test]
fn a_feature_that_the_node_does_not_have_is_refused_in_one_line() {
    let source = json!({ "secretKeyRef": { "name": "s", "key": "k" } });
    let container =
        json!({ "name": "web", "command": ["/c"], "env": [{ "name": "S", "valueFrom": source }] });
    let refused = spec_json(container, json!({})).unwrap_err();
    assert_eq!(refused.to_string(), "valueFrom of S is not available on the local node");
}
