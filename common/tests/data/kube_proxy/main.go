// Writes random Services with the endpoints that kube-proxy uses for them, one JSON object a line.
//
// The decisions are those of Kubernetes' own package pkg/proxy: its change trackers and CategorizeEndpoints.
// The first argument is the number of cases, the second the seed.
package main

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"sort"
	"strconv"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/proxy"
)

const node = "n1"

// Case is one line of the output.
type Case struct {
	Zone    string                     `json:"zone"`
	Service *v1.Service                `json:"service"`
	Slices  []*discovery.EndpointSlice `json:"slices"`
	// Endpoints that clients on the node use, by "ADDRESS PORT PROTOCOL" of the Service.
	Endpoints map[string][]string `json:"endpoints"`
	// True for the ports that have usable endpoints somewhere in the cluster.
	Exists map[string]bool `json:"exists"`
}

func oneOf[T any](r *rand.Rand, all ...T) T { return all[r.Intn(len(all))] }

func optional(r *rand.Rand, chance int) *bool {
	if r.Intn(chance) == 0 {
		return nil
	}
	value := r.Intn(2) == 0
	return &value
}

func service(r *rand.Rand) *v1.Service {
	families := oneOf(r, []v1.IPFamily{v1.IPv4Protocol}, []v1.IPFamily{v1.IPv6Protocol}, []v1.IPFamily{v1.IPv6Protocol, v1.IPv4Protocol})
	var ips []string
	for _, family := range families {
		ips = append(ips, map[v1.IPFamily]string{v1.IPv4Protocol: "10.96.0.1", v1.IPv6Protocol: "fd00::1"}[family])
	}
	policy := oneOf(r, v1.ServiceInternalTrafficPolicyCluster, v1.ServiceInternalTrafficPolicyLocal)
	spec := v1.ServiceSpec{
		Type: oneOf(r, v1.ServiceTypeClusterIP, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer),
		ClusterIP: ips[0], ClusterIPs: ips, IPFamilies: families, InternalTrafficPolicy: &policy,
	}
	names := []int{0, 1, 2}
	for index := range 1 + r.Intn(3) {
		port := v1.ServicePort{
			Name: []string{"web", "admin", ""}[names[index]], Port: int32(80 + index),
			Protocol: oneOf(r, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP),
		}
		if spec.Type != v1.ServiceTypeClusterIP {
			port.NodePort = int32(30000 + index)
		}
		spec.Ports = append(spec.Ports, port)
	}
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "d"}, Spec: spec}
}

func hints(r *rand.Rand, zones, nodes bool) *discovery.EndpointHints {
	all := discovery.EndpointHints{}
	if zones && r.Intn(30) > 0 {
		for range 1 + r.Intn(2) {
			all.ForZones = append(all.ForZones, discovery.ForZone{Name: oneOf(r, "a", "b", "c")})
		}
	}
	if nodes && r.Intn(30) > 0 {
		for range 1 + r.Intn(2) {
			all.ForNodes = append(all.ForNodes, discovery.ForNode{Name: oneOf(r, "n1", "n2", "n3")})
		}
	}
	if all.ForZones == nil && all.ForNodes == nil {
		return nil
	}
	return &all
}

// Returns slices in which no address occurs twice: Kubernetes' result is undefined then.
func slices(r *rand.Rand) []*discovery.EndpointSlice {
	zones, nodes, unready := r.Intn(2) == 0, r.Intn(3) == 0, r.Intn(5) == 0
	var all []*discovery.EndpointSlice
	next := 0
	for index := range 1 + r.Intn(3) {
		family := oneOf(r, discovery.AddressTypeIPv4, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6)
		slice := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("s-%d", index), Namespace: "d", Labels: map[string]string{discovery.LabelServiceName: "s"},
			},
			AddressType: family,
		}
		for range 1 + r.Intn(3) {
			port := discovery.EndpointPort{}
			name, number := oneOf(r, "web", "web", "admin", ""), int32(8080+r.Intn(2))
			protocol := oneOf(r, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
			port.Protocol = &protocol
			if r.Intn(20) > 0 {
				port.Name = &name
			}
			if r.Intn(20) > 0 {
				port.Port = &number
			}
			slice.Ports = append(slice.Ports, port)
		}
		for range 1 + r.Intn(5) {
			next++
			address := fmt.Sprintf("10.0.0.%d", next)
			if family == discovery.AddressTypeIPv6 {
				address = fmt.Sprintf("fd00:1::%x", next)
			}
			ready := optional(r, 10)
			if unready {
				no := false
				ready = &no
			}
			endpoint := discovery.Endpoint{
				Addresses:  []string{address},
				Conditions: discovery.EndpointConditions{Ready: ready, Serving: optional(r, 10), Terminating: optional(r, 4)},
				Hints:      hints(r, zones, nodes),
			}
			if name := oneOf(r, "n1", "n2", "n3", ""); name != "" {
				endpoint.NodeName = &name
			}
			slice.Endpoints = append(slice.Endpoints, endpoint)
		}
		all = append(all, slice)
	}
	return all
}

func decide(it *Case) {
	it.Endpoints, it.Exists = map[string][]string{}, map[string]bool{}
	for _, family := range it.Service.Spec.IPFamilies {
		services := make(proxy.ServicePortMap)
		changes := proxy.NewServiceChangeTracker(family, nil, nil)
		changes.Update(nil, it.Service)
		services.Update(changes)
		tracker := proxy.NewEndpointsChangeTracker(family, node, nil, nil)
		for _, slice := range it.Slices {
			// As the meta proxier of dual-stack clusters.
			if (slice.AddressType == discovery.AddressTypeIPv6) == (family == v1.IPv6Protocol) {
				tracker.EndpointSliceUpdate(slice, false)
			}
		}
		endpoints := make(proxy.EndpointsMap)
		endpoints.Update(tracker)
		labels := map[string]string{}
		if it.Zone != "" {
			labels[v1.LabelTopologyZone] = it.Zone
		}
		for name, port := range services {
			cluster, local, _, exists := proxy.CategorizeEndpoints(endpoints[name], port, node, labels)
			used := cluster
			if port.InternalPolicyLocal() {
				used = local
			}
			key := fmt.Sprintf("%s %d %s", port.ClusterIP(), port.Port(), port.Protocol())
			it.Endpoints[key], it.Exists[key] = []string{}, exists
			for _, endpoint := range used {
				it.Endpoints[key] = append(it.Endpoints[key], endpoint.String())
			}
			sort.Strings(it.Endpoints[key])
		}
	}
}

func main() {
	cases, _ := strconv.Atoi(os.Args[1])
	seed, _ := strconv.ParseInt(os.Args[2], 10, 64)
	r := rand.New(rand.NewSource(seed))
	out := json.NewEncoder(os.Stdout)
	for range cases {
		it := Case{Zone: oneOf(r, "a", "a", "a", ""), Service: service(r), Slices: slices(r)}
		decide(&it)
		if err := out.Encode(it); err != nil {
			panic(err)
		}
	}
}
