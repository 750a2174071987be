// Command peer speaks to a Muster server as grpc-go does. It checks health by unary calls, many at once and one after
// another, watches it on a stream, and calls a method that does not exist.
//
//	peer ADDRESS
//
// Prints one line for each check, and ends with status 1 at the first that fails.
package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

func require(ok bool, format string, values ...interface{}) {
	if !ok {
		fmt.Printf("FAILED: "+format+"\n", values...)
		os.Exit(1)
	}
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	connection, err := grpc.DialContext(ctx, os.Args[1], grpc.WithInsecure(), grpc.WithBlock())
	require(err == nil, "dial: %v", err)
	client := health.NewHealthClient(connection)

	for n := 0; n < 100; n++ {
		answer, err := client.Check(ctx, &health.HealthCheckRequest{})
		require(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "check %d: %v %v", n, answer, err)
	}
	fmt.Println("ok: 100 health checks, one after another")

	var group sync.WaitGroup
	for n := 0; n < 16; n++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for m := 0; m < 50; m++ {
				_, err := client.Check(ctx, &health.HealthCheckRequest{})
				require(err == nil, "check beside others: %v", err)
			}
		}()
	}
	group.Wait()
	fmt.Println("ok: 800 health checks, 16 at once")

	streaming, stop := context.WithCancel(ctx)
	watch, err := client.Watch(streaming, &health.HealthCheckRequest{})
	require(err == nil, "watch: %v", err)
	first, err := watch.Recv()
	require(err == nil && first.Status == health.HealthCheckResponse_SERVING, "watch: %v %v", first, err)
	stop()
	_, err = watch.Recv()
	require(status.Code(err) == codes.Canceled, "a watch that was cancelled: %v", err)
	fmt.Println("ok: a watch, cancelled")

	err = connection.Invoke(ctx, "/no.such.Service/Method", &health.HealthCheckRequest{}, &health.HealthCheckResponse{})
	require(status.Code(err) == codes.Unimplemented, "an unknown method: %v", err)
	fmt.Println("ok: an unknown method is unimplemented")

	short, stopShort := context.WithTimeout(ctx, time.Nanosecond)
	defer stopShort()
	_, err = client.Check(short, &health.HealthCheckRequest{})
	require(status.Code(err) == codes.DeadlineExceeded, "a deadline that has passed: %v", err)
	answer, err := client.Check(ctx, &health.HealthCheckRequest{})
	require(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "after all: %v %v", answer, err)
	require(connection.Close() == nil, "close")
	fmt.Println("ok: the connection is whole after all")
}
