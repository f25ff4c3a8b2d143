// The libraries with which GitLab's agentk 14.1 dials kas inside WebSocket.
module kas.test/grpc-go

go 1.17

require (
	google.golang.org/grpc v1.39.0
	google.golang.org/protobuf v1.27.1
	nhooyr.io/websocket v1.8.7
)

require (
	github.com/golang/protobuf v1.5.0 // indirect
	github.com/klauspost/compress v1.10.3 // indirect
	golang.org/x/net v0.0.0-20200822124328-c89045814202 // indirect
	golang.org/x/sys v0.0.0-20200323222414-85ca7c5b95cd // indirect
	golang.org/x/text v0.3.2 // indirect
	google.golang.org/genproto v0.0.0-20200526211855-cb27e3aa2013 // indirect
)
