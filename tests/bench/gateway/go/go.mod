module bench.rouse.dev/gateway

go 1.24
