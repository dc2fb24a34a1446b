package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/rdyloop/nsq"
)

// floor is no library: one goroutine, one buffer, no handlers, nothing that a consumer needs beside FIN. What it costs is what the system costs.
const floor = "floor"

// floorMessage is where the ID lies in a message frame: behind its size, type, timestamp and attempts.
const floorMessage = 8 + 8 + 2

func startFloor(cfg clientConfig, m *meter) (stop func(), err error) {
	if cfg.TLS || cfg.Snappy || cfg.Deflate {
		return nil, errors.New("the floor has no layers")
	}
	nc, err := net.Dial("tcp", cfg.Addr)
	if err != nil {
		return nil, err
	}
	hello := "  V2IDENTIFY\n\x00\x00\x00\x02{}" + fmt.Sprintf("SUB %s %s\nRDY %d\n", cfg.Topic, cfg.Channel, cfg.MaxInFlight)
	if _, err := io.WriteString(nc, hello); err != nil {
		return nil, errors.Join(err, nc.Close())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = floorLoop(nc, m) // an end too early is noticed by the number of messages
	}()
	return func() {
		<-ended // the last FINs are written after the last message was counted
		_ = nc.Close()
	}, nil
}

// floorLoop answers messages until all have come: a read, then a write with the FIN of all that it brought.
func floorLoop(nc net.Conn, m *meter) error {
	buf := make([]byte, 0, 64<<10)
	var fins []byte
	for handled := int64(0); handled < m.all; {
		n, err := nc.Read(buf[len(buf):cap(buf)])
		if err != nil {
			return err
		}
		buf = buf[:len(buf)+n]
		rest := buf
		fins = fins[:0]
		for len(rest) >= 4 {
			size := 4 + int(binary.BigEndian.Uint32(rest))
			if size > cap(buf) {
				buf = append(make([]byte, 0, 2*size), rest...)
				rest = buf
			}
			if len(rest) < size {
				break
			}
			if binary.BigEndian.Uint32(rest[4:]) == uint32(nsq.FrameTypeMessage) {
				fins = append(append(append(fins, "FIN "...), rest[floorMessage:floorMessage+16]...), '\n')
				handled++
				m.one()
			}
			rest = rest[size:]
		}
		buf = buf[:copy(buf[:cap(buf)], rest)]
		if len(fins) > 0 {
			if _, err := nc.Write(fins); err != nil {
				return err
			}
		}
	}
	return nil
}

// withoutLayers tells whether the floor can take part in a workload.
func (w workload) withoutLayers() bool { return !w.tls && !w.snappy && !w.deflate }
