module github.com/rdyloop/nsq/examples

go 1.25.0
